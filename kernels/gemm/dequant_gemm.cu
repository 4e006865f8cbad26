// Grouped GEMM that dequantizes its weights in registers, for sm_90a. dequant_layout.py has the layout, dequant_gemm.py
// the measurements. dequant_few.cu is the form for a few rows in all.
//
// The weights are the M side of wgmma. Each thread reads its 16 bytes of quants in the order of wgmma's A operand,
// dequantizes them to bf16 in registers, and multiplies by bf16 tokens in shared memory. One warp walks the tiles
// and another streams their weights and tokens through a ring of stages. Each consumer warpgroup owns its weight rows.
//
// Macros: those of dequant_unit.cuh and dequant_result.cuh, and
//   WARPGROUPS (64 weight rows of a tile each), STAGES, STAGE_K64 (columns of a stage / 64; divides `units`), CHUNK
//   (columns of a chunk of weights / 64; divides STAGE_K64), BATCH (steps of 16 columns that are dequantized before
//   they are multiplied), BUFFERS (dequantized batches that are held), ROLLING (wait for the oldest buffer; otherwise
//   the last of BUFFERS and of a stage waits for all), CASES (smaller numbers of blocks with specialized code),
//   MAX_GROUPS, KEEP_TOKENS (L2 keeps tokens and evicts weights first), OVERLAPPED (dequant_tokens.cu dequantizes
//   tokens while this kernel runs, and counts them).

#include "clock.cuh"
#include "dequant_result.cuh"
#include "dequant_unit.cuh"

static_assert(WARPGROUPS >= 1 && WARPGROUPS * 128 + 64 <= 1024, "WARPGROUPS: with two more warps they are a block");
static_assert(STAGES >= 2 && STAGE_K64 % CHUNK == 0, "CHUNK: a stage is whole chunks, of which one is loaded ahead");
static_assert(4 % BATCH == 0 && BUFFERS >= 1, "BATCH: 64 columns are whole batches of steps of 16");

constexpr int TILE_UNITS = WARPGROUPS;
constexpr int TOKEN_BYTES = MAX_BLOCKS * BLOCK_BYTES;
constexpr int WEIGHT_STAGE = TILE_UNITS * STAGE_K64 * UNIT_BYTES;
constexpr int STAGE_BYTES = WEIGHT_STAGE + STAGE_K64 * TOKEN_BYTES;
// Tiles that the walk may be ahead of the loads; free blocks take the next.
constexpr int TILES_AHEAD = OVERLAPPED ? 1 : 4;
constexpr int TILE_SLOTS = 12;
constexpr int WARP = 32;                 // lanes that walk; tests on a CPU have one
constexpr bool MARKED = W_FMT != NVFP4;  // units of rows may have special values
// First threads of a warp that loads and of one that walks.
constexpr int LOADER = WARPGROUPS * 128, WALKER = LOADER + 32;

// Matrix descriptor of K-major tokens without swizzle: 8x8 core matrices of 128 bytes, the next 8 columns 128 bytes
// away, the next 8 tokens BLOCK_BYTES away.
__device__ __forceinline__ u64 token_descriptor(u32 address) {
  return static_cast<u64>((address & 0x3FFFF) >> 4) | (static_cast<u64>(128 >> 4) << 16) |
         (static_cast<u64>(BLOCK_BYTES >> 4) << 32);
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// acc[64 weight rows, 8 * BLOCKS tokens] += a (registers) * tokens (shared memory), over 16 columns.
template <int BLOCKS>
struct Wgmma;

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8(i) D4(i), D4(i + 4)
#define D16(i) D8(i), D8(i + 8)
#define D32(i) D16(i), D16(i + 16)
#define D64(i) D32(i), D32(i + 32)
#define R4 "%0, %1, %2, %3"
#define R8 R4 ", %4, %5, %6, %7"
#define R12 R8 ", %8, %9, %10, %11"
#define R16 R12 ", %12, %13, %14, %15"
#define R20 R16 ", %16, %17, %18, %19"
#define R24 R20 ", %20, %21, %22, %23"
#define R32 R24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define R40 R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define R48 R40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define R56 R48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define R64 R56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define R72 R64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define R80 R72 ", %72, %73, %74, %75, %76, %77, %78, %79"

// REGISTERS names the results of D in the instruction, A and TOKENS the operands that follow them.
#define WGMMA(BLOCKS, WIDTH, REGISTERS, A, TOKENS, ...)                                                            \
  template <>                                                                                                      \
  struct Wgmma<BLOCKS> {                                                                                           \
    static __device__ __forceinline__ void run(float (&d)[4 * BLOCKS], const u32 (&a)[4], u64 tokens) {            \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" WIDTH "k16.f32.bf16.bf16 {" REGISTERS "}, {" A "}, " TOKENS \
                   ", 1, 1, 1, 0;"                                                                                 \
                   : __VA_ARGS__                                                                                   \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens));                                     \
    }                                                                                                              \
  };
WGMMA(1, "8", R4, "%4, %5, %6, %7", "%8", D4(0))
WGMMA(2, "16", R8, "%8, %9, %10, %11", "%12", D8(0))
WGMMA(3, "24", R12, "%12, %13, %14, %15", "%16", D8(0), D4(8))
WGMMA(4, "32", R16, "%16, %17, %18, %19", "%20", D16(0))
WGMMA(5, "40", R20, "%20, %21, %22, %23", "%24", D16(0), D4(16))
WGMMA(6, "48", R24, "%24, %25, %26, %27", "%28", D16(0), D8(16))
WGMMA(8, "64", R32, "%32, %33, %34, %35", "%36", D32(0))
WGMMA(10, "80", R40, "%40, %41, %42, %43", "%44", D32(0), D8(32))
WGMMA(12, "96", R48, "%48, %49, %50, %51", "%52", D32(0), D16(32))
WGMMA(14, "112", R56, "%56, %57, %58, %59", "%60", D32(0), D16(32), D8(48))
WGMMA(16, "128", R64, "%64, %65, %66, %67", "%68", D64(0))
WGMMA(18, "144", R72, "%72, %73, %74, %75", "%76", D64(0), D8(64))
WGMMA(20, "160", R80, "%80, %81, %82, %83", "%84", D64(0), D16(64))

// Waits until the overlapped kernel has dequantized `blocks` blocks of 8 tokens from `first` on. For each block, that
// kernel counts the warps of `team` that are done. A whole warp calls this. After PATIENCE_NS the kernel ends in an
// error.
__device__ __forceinline__ void await_tokens(const u32* counters, int first, int blocks, u32 team) {
  const int lane = threadIdx.x & 31;
  if (lane < blocks && first + lane >= 0) {
    long long start = 0;
    for (u32 warps;;) {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(warps) : "l"(counters + 1 + first + lane) : "memory");
      if (warps >= team) break;
      keep_patience(start);
    }
  }
  __syncwarp();
  asm volatile("fence.proxy.async.global;" ::: "memory");  // makes what this warp saw visible to the copy engine
}

// Which slot is next, and the parity of its barriers.
struct Slot {
  int at = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance() {
    if (++at == TILE_SLOTS) at = 0, parity ^= 1;
  }
};

struct Groups {
  int offsets[MAX_GROUPS + 1], experts[MAX_GROUPS];  // -1 where a group is not computed
};

// Walks the tiles of a block. A whole warp calls it, of which all lanes know the same.
//
// The tokens of a group are split into parts, and the weight rows of each part into cuts, as evenly as whole units
// allow. Blocks process the cuts in turn; each cut is a tile. With OVERLAPPED a free block gets the next cut, because
// some blocks start late. If there are at most as many parts as blocks, and the busiest block then has fewer weight
// rows, a block gets at most one cut, of several tiles. If the last round has cuts for at most a third of the blocks,
// they are split into pieces.
struct Walk {
  const Groups& groups;
  int num_groups;
  u32* taken;               // cuts and pieces that all blocks have begun
  int cuts, units, larger;  // `larger` cuts have a unit more than `units`
  int whole, pieces;        // cuts before the last round, and pieces of each cut in the last round
  int number, first,
      before;  // next cut (piece from `whole` on), group where its search starts, parts before that group
  int left;    // units of the current cut that are left for further tiles

  __device__ __forceinline__ int parts_of(int group) const {
    if (group >= num_groups || groups.experts[group] < 0) return 0;
    return ceil_div(max(groups.offsets[group + 1] - groups.offsets[group], 0), TILE_TOKENS);
  }

  __device__ __forceinline__ void cut(int unit_rows) {
    units = fast_divided(unit_rows, cuts);
    larger = unit_rows - units * cuts;
  }

  __device__ __forceinline__ int following(int number) const {
    if (!OVERLAPPED) return number + static_cast<int>(gridDim.x);
    const u32 next = threadIdx.x % WARP == 0 ? atomicAdd(taken, 1) : 0;
    return static_cast<int>(__shfl_sync(0xFFFFFFFF, next, 0));
  }

  __device__ __forceinline__ Walk(const Groups& groups, int num_groups, int unit_rows, u32* taken)
      : groups(groups), num_groups(num_groups), taken(taken) {
    first = before = left = 0;
    number = following(static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x));
    whole = 0x7FFFFFFF, pieces = 1;
    cuts = ceil_div(unit_rows, TILE_UNITS);
    cut(unit_rows);
    int parts = 0;
    for (int group = threadIdx.x % WARP; group < num_groups; group += WARP) parts += parts_of(group);
    parts = __reduce_add_sync(0xFFFFFFFF, parts);
    const int blocks = gridDim.x;
    if (parts == 0) return;
    // Not with OVERLAPPED: the tokens that are dequantized last would be needed at once.
    if (!OVERLAPPED && parts <= blocks) {
      const int most = fast_divided(blocks, parts), high = fast_divided(unit_rows + most - 1, most);
      if (high < TILE_UNITS * fast_divided(parts * cuts + blocks - 1, blocks)) {
        cuts = fast_divided(unit_rows + high - 1, high);
        cut(unit_rows);
      }
    }
    const int last = parts * cuts % blocks;
    if (last == 0 || 3 * last > blocks) return;
    pieces = min(blocks / last, units);
    whole = parts * cuts - last;
  }

  __device__ __forceinline__ bool find(Tile& tile) {
    const int lane = threadIdx.x % WARP;
    const bool pieced = number >= whole;
    const int wanted = pieced ? whole + (number - whole) / pieces : number;
    for (; first < num_groups; first += WARP) {
      const int own = parts_of(first + lane);
      int until = own;  // parts of this lane's group and of those before it
#pragma unroll
      for (int lanes = 1; lanes < WARP; lanes *= 2) {
        const int others = __shfl_up_sync(0xFFFFFFFF, until, lanes);
        if (lane >= lanes) until += others;
      }
      const u32 beyond = __ballot_sync(0xFFFFFFFF, wanted < (before + until) * cuts);
      if (beyond == 0) {
        before += __shfl_sync(0xFFFFFFFF, until, WARP - 1);
        continue;
      }
      const int from = __ffs(beyond) - 1, group = first + from;
      const int parts = __shfl_sync(0xFFFFFFFF, own, from), until_group = __shfl_sync(0xFFFFFFFF, until, from);
      const int within = wanted - (before + until_group - parts) * cuts;
      const int part = parts == 1 ? 0 : within / cuts, cut = within - part * cuts;
      const int start = groups.offsets[group], rows = groups.offsets[group + 1] - start;
      // Split evenly: a tile of few tokens dequantizes as many weights as one of many.
      const int tokens = parts == 1 ? rows : ceil_div(ceil_div(rows, parts), 8) * 8;
      const int local = part * tokens, unit = cut * units + min(cut, larger);
      tile = {group, start, local, min(rows - local, tokens), groups.experts[group], unit, 0, 0};
      left = units + (cut < larger);
      if (pieced) {
        const int piece = (number - whole) % pieces, first_unit = left * piece / pieces;
        tile.unit += first_unit;
        left = left * (piece + 1) / pieces - first_unit;
      }
      number = following(number);
      return true;
    }
    return false;
  }

  // The tile after `tile`; after the last, one without rows.
  __device__ __forceinline__ Tile next(Tile tile) {
    tile.unit += tile.high;
    if (left == 0 && !find(tile)) {
      tile.rows = 0;
      return tile;
    }
    tile.high = left <= TILE_UNITS ? left : ceil_div(left, ceil_div(left, TILE_UNITS));
    left -= tile.high;
    return tile;
  }
};

// Consumes the stages of a tile in which this warpgroup has no weight rows.
__device__ __forceinline__ void skip(int units, u32 full, u32 empty, int stage, u32 parity) {
  for (int k64 = 0; k64 < units; k64 += STAGE_K64) {
    barrier_wait(full + stage * 8, parity);
    barrier_arrive_warp(empty + stage * 8);
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
}

template <int BLOCKS, bool SPECIAL_VALUES = false>
__device__ __forceinline__ void consume(const Problem& p, const Tile& tile, u32 stages, u32 full, u32 empty, int stage,
                                        u32 parity, float (*turned)[8 * MOST_AT_A_TIME][TURNED_COLUMNS],
                                        TileScales* tile_scales, const Requantization& with) {
  const int thread = threadIdx.x & 127, warpgroup = threadIdx.x / 128;
  TileScales& scales = tile_scales[warpgroup];
  scales.copy(p, tile);
  float acc[4 * BLOCKS];
#pragma unroll
  for (int i = 0; i < 4 * BLOCKS; ++i) acc[i] = 0.0f;
  constexpr int PART_BATCHES = 4 / BATCH;
  static_assert(!ROLLING || PART_BATCHES % BUFFERS == 0, "buffers must come in turn from stage to stage");
  u32 a[BUFFERS][BATCH][4];
  int last = -1;
  Unit<SPECIAL_VALUES> ahead;  // quants of the next part of the stage, loaded while this one is multiplied
  // Addresses of this thread in the first part of the stage.
  const u32 first_quants = stages + warpgroup * CHUNK * UNIT_BYTES + thread * 16;
  const u64 first_tokens = token_descriptor(stages + WEIGHT_STAGE);
  const int to_scales = QUANT_BYTES + (W_FMT == NVFP4 ? thread * 2 : thread / 2 * 2) - thread * 16;
  u32 quants_at, scales_at;
  auto load_part = [&](int part) {
    if (part == 0) {
      quants_at = first_quants + stage * STAGE_BYTES;
      scales_at = quants_at + to_scales;
      // Keeps both sums in registers; otherwise ptxas recomputes them for each part.
      asm("" : "+r"(quants_at), "+r"(scales_at));
    }
    const int distance = (part / CHUNK * WARPGROUPS * CHUNK + part % CHUNK) * UNIT_BYTES;
    ahead.load(quants_at + distance, scales_at + distance);
  };
  auto multiply_part = [&](int part) {
    // The address is in the lower word and does not overflow.
    const u64 tokens = (first_tokens & ~0xFFFFFFFFull) | (static_cast<u32>(first_tokens) + stage * (STAGE_BYTES >> 4));
    const Unit<SPECIAL_VALUES> unit = ahead;
#pragma unroll
    for (int batch = 0; batch < PART_BATCHES; ++batch) {
      const int number = part * PART_BATCHES + batch;
      auto& operands = a[number % BUFFERS];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) unit.dequantize(batch * BATCH + i, operands[i]);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        Wgmma<BLOCKS>::run(acc, operands[i], tokens + ((part * TOKEN_BYTES + (batch * BATCH + i) * 256) >> 4));
      }
      wgmma_commit();
      if (batch == PART_BATCHES - 1 && part + 1 < STAGE_K64) load_part(part + 1);
      if (ROLLING) {
        wgmma_wait<BUFFERS - 1>();
        // The MMAs of the previous stage are done only now.
        if (number == BUFFERS - 1 && last >= 0) barrier_arrive_warp(empty + last * 8);
      } else if (number % BUFFERS == BUFFERS - 1 || number == STAGE_K64 * PART_BATCHES - 1) {
        wgmma_wait<0>();
      }
    }
  };
  for (int k64 = 0; k64 < p.units; k64 += STAGE_K64) {
    barrier_wait(full + stage * 8, parity);
    load_part(0);
#pragma unroll
    for (int part = 0; part < STAGE_K64; ++part) multiply_part(part);
    if (!ROLLING) barrier_arrive_warp(empty + stage * 8);
    last = stage;
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  if (ROLLING) {
    wgmma_wait<0>();
    barrier_arrive_warp(empty + last * 8);
  }
  finish<BLOCKS>(p, tile, scales, with, warpgroup, tile.unit + warpgroup, acc, turned[warpgroup]);
}

extern "C" __global__ void __launch_bounds__(WARPGROUPS * 128 + 128, 1)
    dequant_gemm(const u8* tokens, const u8* weights, const float* row_scale, const float* expert_scales,
                 const float* bias, const int* group_offsets, const int* expert_ids, const int* num_active, void* out,
                 u8* out_scales, const float* out_gsf, float* out_row_scale, const int* out_scale_offsets,
                 int num_groups, int num_experts, int capacity, int columns, int units, int unit_rows, int token_blocks,
                 long long out_stride, int scales_per_expert, int gate_up_order, const u8* special_values,
                 u32* counters, int first_overlapped, int team) {
  extern __shared__ __align__(128) u8 memory[];
  constexpr int BARRIERS = 2 * STAGES + (MARKED ? 3 : 2) * TILE_SLOTS;
  __shared__ __align__(8) u64 barriers[BARRIERS];
  __shared__ __align__(16) float turned[ACTIVATED ? WARPGROUPS : 1][8 * MOST_AT_A_TIME][TURNED_COLUMNS];
  __shared__ TileScales tile_scales[WARPGROUPS];
  __shared__ Requantization with;
  __shared__ Groups groups;
  __shared__ Tile tiles[TILE_SLOTS];
  // A tile overwrites the one of TILE_SLOTS tiles ago. That is safe: a warp that still reads it holds the stages of
  // later tiles, and the walk is not too far ahead of the loads.
  static_assert(TILE_SLOTS > STAGES + TILES_AHEAD, "tiles that a block may be ahead");
  const u32 full = shared_address(barriers), empty = full + STAGES * 8;
  // Of each slot: its tile is found, for the loader; its tile has its marks, for the consumers; its tile is loaded, for
  // the walk.
  const u32 announced = empty + STAGES * 8, loaded = announced + TILE_SLOTS * 8;
  const u32 found = MARKED ? loaded + TILE_SLOTS * 8 : announced;
  const u32 stages = shared_address(memory);
  // The next kernel is the GEMM that reads these results. It waits for them, and may load its weights before.
  if (OUT_DEQUANTIZED) asm volatile("griddepcontrol.launch_dependents;");
  const int active = num_active ? max(*num_active, 0) : num_groups;
  for (int g = threadIdx.x; g <= num_groups; g += blockDim.x) {
    groups.offsets[g] = min(max(group_offsets[g], 0), capacity);
    if (g < num_groups) groups.experts[g] = expert_ids[g] < num_experts ? expert_ids[g] : -1;
  }
  if (threadIdx.x < BARRIERS) {
    const int number = static_cast<int>(threadIdx.x) - STAGES, slot = number - STAGES - TILE_SLOTS;
    const bool of_empty = number >= 0 && number < STAGES, of_loaded = slot >= 0 && slot < TILE_SLOTS;
    barrier_init(full + threadIdx.x * 8, of_empty    ? 4 * WARPGROUPS * ARRIVALS_OF_WARP
                                         : of_loaded ? ARRIVALS_OF_WARP
                                                     : 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  const Problem p = {tokens,       weights,    row_scale,         expert_scales, bias,
                     out,          out_scales, out_scale_offsets, columns,       GATED ? 2 * columns : columns,
                     units,        unit_rows,  token_blocks,      out_stride,    scales_per_expert,
                     gate_up_order};
  int stage = 0;
  u32 parity = 0;
  if (threadIdx.x >= LOADER) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(WARPGROUPS == 4 ? 32 : 40));
    if (threadIdx.x >= WALKER + 32) return;
    const int lane = threadIdx.x & 31;
    if (threadIdx.x >= WALKER) {
      Walk walk(groups, min(num_groups, active), unit_rows, counters);
      Slot slot, before;  // `before` has the tile that must be loaded before one of `slot` is found
      Tile next = {};
      for (int number = 0;; ++number, slot.advance()) {
        if (number >= TILES_AHEAD) {
          barrier_wait(loaded + before.at * 8, before.parity);
          before.advance();
        }
        next = walk.next(next);
        if (lane == 0) {
          tiles[slot.at] = next;
          barrier_arrive(found + slot.at * 8);
        }
        if (MARKED) {
          const bool own = next.rows > 0 && lane < next.high;
          const u8 mark = own ? special_values[static_cast<long long>(next.expert) * unit_rows + next.unit + lane] : 0;
          const u32 marks = __ballot_sync(0xFFFFFFFF, mark != 0);
          if (lane == 0) {
            tiles[slot.at].special_values = marks;
            barrier_arrive(announced + slot.at * 8);
          }
        }
        if (next.rows == 0) return;
      }
    }
    const u64 of_weights = KEEP_TOKENS ? policy_of_first_out() : 0, of_tokens = KEEP_TOKENS ? policy_of_last_out() : 0;
    bool early = true;
    for (Slot slot;; slot.advance()) {
      const Tile& tile = tiles[slot.at];
      barrier_wait(found + slot.at * 8, slot.parity);
      if (tile.rows == 0) break;
      const int blocks = (tile.rows + 7) / 8;
      const u8* w =
          weights + (static_cast<long long>(tile.expert) * units * unit_rows + tile.unit * CHUNK) * UNIT_BYTES;
      const u8* t = tokens + tile.token_block() * BLOCK_BYTES;
      auto load = [&](u32 to, const u8* from, u32 bytes, int to_stage, u64 policy) {
        if (KEEP_TOKENS) bulk_load(to, from, bytes, full + to_stage * 8, policy);
        else bulk_load(to, from, bytes, full + to_stage * 8);
      };
      auto load_weights = [&](int k64, int to_stage) {
        if (lane == 0) barrier_expect(full + to_stage * 8, STAGE_K64 * (tile.high * UNIT_BYTES + blocks * BLOCK_BYTES));
        __syncwarp();
        if (lane < STAGE_K64 / CHUNK) {
          load(stages + to_stage * STAGE_BYTES + lane * WARPGROUPS * CHUNK * UNIT_BYTES,
               w + static_cast<long long>(k64 + lane * CHUNK) * unit_rows * UNIT_BYTES, tile.high * CHUNK * UNIT_BYTES,
               to_stage, of_weights);
        }
      };
      auto load_tokens = [&](int k64, int to_stage) {
        if (lane < STAGE_K64) {
          load(stages + to_stage * STAGE_BYTES + WEIGHT_STAGE + lane * TOKEN_BYTES,
               t + static_cast<long long>(k64 + lane) * token_blocks * BLOCK_BYTES, blocks * BLOCK_BYTES, to_stage,
               of_tokens);
        }
      };
      if (OVERLAPPED) await_tokens(counters, static_cast<int>(tile.token_block()) - first_overlapped, blocks, team);
      int ahead = 0;  // units whose weights are loaded
      if (!OVERLAPPED && early) {
        // Weights do not depend on the previous kernel, which may still be dequantizing the tokens.
        ahead = min(STAGES * STAGE_K64, units);
#pragma unroll 1
        for (int k64 = 0; k64 < ahead; k64 += STAGE_K64) load_weights(k64, k64 / STAGE_K64);
        asm volatile("griddepcontrol.wait;" ::: "memory");
        early = false;
      }
#pragma unroll 1
      for (int k64 = 0; k64 < units; k64 += STAGE_K64) {
        if (k64 >= ahead) {
          barrier_wait(empty + stage * 8, parity ^ 1);
          load_weights(k64, stage);
        }
        load_tokens(k64, stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
      barrier_arrive_warp(loaded + slot.at * 8);
    }
    // Even without a tile, this kernel must not end before the one that it overlaps. With OVERLAPPED, that kernel
    // started after all kernels before it had ended, so waiting for its end is enough.
    if (early) asm volatile("griddepcontrol.wait;" ::: "memory");
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WARPGROUPS == 2 ? 232 : 112));
    // The previous kernel may write the scales of the rows.
    if (!OVERLAPPED) asm volatile("griddepcontrol.wait;" ::: "memory");
    if (ACTIVATED && OUT_FMT == NVFP4) {
      // Write the row scales of all rows while the loads of tokens are in flight.
      const float gsf = clamped(*out_gsf), scale = __frcp_rn(gsf);
      constexpr int THREADS = WARPGROUPS * 128;
      with.gsf = gsf;
      if (threadIdx.x < 128) with.prepare(gsf, threadIdx.x);
      asm volatile("bar.sync %0, %1;" ::"n"(1 + WARPGROUPS), "n"(THREADS) : "memory");
      for (int i = blockIdx.x * THREADS + threadIdx.x; i < capacity; i += gridDim.x * THREADS) out_row_scale[i] = scale;
    }
    // The shuffle makes the value warp-uniform for the compiler, which then uses uniform registers.
    const int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
    for (Slot slot;; slot.advance()) {
      barrier_wait(announced + slot.at * 8, slot.parity);
      const Tile& tile = tiles[slot.at];
      const int blocks = (tile.rows + 7) / 8;
      if (blocks == 0) break;
      if (warpgroup >= tile.high) {
        skip(units, full, empty, stage, parity);
      } else if (MARKED && (tile.special_values >> warpgroup & 1)) {
        consume<MAX_BLOCKS, true>(p, tile, stages, full, empty, stage, parity, turned, tile_scales, with);
      } else {
#define CASE(N)                                                                                        \
  if (blocks <= N) consume<N>(p, tile, stages, full, empty, stage, parity, turned, tile_scales, with); \
  else
        CASES consume<MAX_BLOCKS>(p, tile, stages, full, empty, stage, parity, turned, tile_scales, with);
      }
      stage += units / STAGE_K64;
      parity ^= stage / STAGES & 1;
      stage %= STAGES;
    }
  }
}
