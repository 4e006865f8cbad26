// Grouped GEMM that dequantizes its weights in registers, for sm_90a. dequant_layout.py has the layout, dequant_gemm.py the
// measurements. dequant_few.cu is the form for a few rows in all.
//
// The weights are the M side of wgmma. Each thread reads its 16 bytes of quants in the order of wgmma's A operand,
// dequantizes them to bf16 in registers, and multiplies by bf16 tokens in shared memory. One producer warp walks the tiles
// and streams weights and tokens through a ring of stages. Each consumer warpgroup owns its weight rows.
//
// With WARP_PRODUCTS each warp multiplies its 16 weight rows by `mma.sync` instead. For operands of bf16 it gives the bits of
// `wgmma` (tests/kernels/test_dequant_gemm.py). A block is then small enough that an SM has several, whose warps hide each other's
// latencies.
//
// Macros: those of dequant_unit.cuh and dequant_result.cuh, and
//   WARPGROUPS (64 weight rows of a tile each), WARP_PRODUCTS, BLOCKS_PER_SM, STAGES, STAGE_K64 (columns of a stage / 64; divides
//   `units`), CHUNK (columns of a chunk of weights / 64; divides STAGE_K64), BATCH (steps of 16 columns that are dequantized before
//   they are multiplied), BUFFERS (dequantized batches that are held), ROLLING (wait for the oldest buffer; otherwise the
//   last of BUFFERS and of a stage waits for all), CASES (smaller numbers of blocks with specialized code), MAX_GROUPS, KEEP_TOKENS
//   (L2 keeps tokens and evicts weights first), OVERLAPPED (dequant_tokens.cu dequantizes tokens while this kernel runs, and counts
//   them).

#include "clock.cuh"
#include "dequant_result.cuh"
#include "dequant_unit.cuh"

constexpr int TILE_UNITS = WARPGROUPS;
constexpr int TOKEN_BYTES = MAX_BLOCKS * BLOCK_BYTES;
constexpr int WEIGHT_STAGE = TILE_UNITS * STAGE_K64 * UNIT_BYTES;
constexpr int STAGE_BYTES = WEIGHT_STAGE + STAGE_K64 * TOKEN_BYTES;
constexpr int TILES_AHEAD = 8;  // tiles that the producer may announce in advance
constexpr int PRODUCERS = WARP_PRODUCTS ? 32 : 128;  // threads; of 128 only a warp loads
constexpr long long PATIENCE_NS = 30'000'000'000;

__device__ __forceinline__ u32 load_4(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

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
#define WGMMA(BLOCKS, WIDTH, REGISTERS, A, TOKENS, ...)                                                    \
  template <>                                                                                             \
  struct Wgmma<BLOCKS> {                                                                                  \
    static __device__ __forceinline__ void run(float (&d)[4 * BLOCKS], const u32 (&a)[4], u64 tokens) {   \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" WIDTH "k16.f32.bf16.bf16 {" REGISTERS "}, {" A     \
                   "}, " TOKENS ", 1, 1, 1, 0;"                                                           \
                   : __VA_ARGS__                                                                          \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens));                            \
    }                                                                                                     \
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

// acc[16 weight rows, 8 tokens] += a * b, over 16 columns.
__device__ __forceinline__ void warp_product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : D4(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Waits until the overlapped kernel has dequantized `blocks` blocks of 8 tokens from `first` on. For each block, that kernel
// counts the warps of `team` that are done. A whole warp calls this. After PATIENCE_NS the kernel ends in an error.
__device__ __forceinline__ void await_tokens(const u32* counters, int first, int blocks, u32 team) {
  const int lane = threadIdx.x & 31;
  if (lane < blocks && first + lane >= 0) {
    long long start = 0;
    for (u32 warps;;) {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(warps) : "l"(counters + 1 + first + lane) : "memory");
      if (warps >= team) break;
      const long long now = clock_ns();
      if (start == 0) start = now;
      if (now - start > PATIENCE_NS) __trap();
    }
  }
  __syncwarp();
  asm volatile("fence.proxy.async.global;" ::: "memory");  // makes what this warp saw visible to the copy engine
}

// Walks the tiles of a block. One thread of the producer calls it and announces the tiles to the consumers.
//
// The tokens of a group are split into parts, and the weight rows of each part into cuts, as evenly as whole units allow.
// Blocks process the cuts in turn; each cut is a tile. With OVERLAPPED a free block gets the next cut, because some blocks
// start late. If there are at most as many parts as blocks, and the busiest block then has fewer weight rows, a block gets
// at most one cut, of several tiles. If the last round has cuts for at most a third of the blocks, they are split into
// pieces.
struct Walk {
  int offsets[MAX_GROUPS + 1], experts[MAX_GROUPS];
  u32 with_parts[(MAX_GROUPS + 31) / 32];  // a bit for each group
  int num_groups, cuts, units, larger;  // `larger` cuts have a unit more than `units`
  int whole, pieces;                    // cuts before the last round, and pieces of each cut in the last round
  int number, group, before;            // next cut (piece from `whole` on), group where its search starts, cuts before that group
  u32* taken;                           // cuts and pieces that all blocks have begun
  int left;                             // units of the cut of `tile` that are left for further tiles
  Tile tile;

  __device__ __forceinline__ int parts_of(int group) const {
    return experts[group] < 0 ? 0 : ceil_div(max(offsets[group + 1] - offsets[group], 0), TILE_TOKENS);
  }

  __device__ __forceinline__ void cut(int unit_rows) {
    units = fast_divided(unit_rows, cuts);
    larger = unit_rows - units * cuts;
  }

  __device__ __forceinline__ int following(int number) const {
    return OVERLAPPED ? static_cast<int>(atomicAdd(taken, 1)) : number + static_cast<int>(gridDim.x);
  }

  // Called before the groups are known.
  __device__ __forceinline__ void prepare(int unit_rows, u32* taken) {
    this->taken = taken;
    group = before = left = 0;
    number = following(static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x));
    whole = 0x7FFFFFFF;
    cuts = ceil_div(unit_rows, TILE_UNITS);
    cut(unit_rows);
  }

  __device__ __forceinline__ void begin(int parts, int unit_rows) {
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

  // Moves `group` on to one that has parts, if it has none. Most may have none: each of few tokens has its own experts.
  __device__ __forceinline__ bool next_with_parts() {
    for (; group < num_groups; group = (group / 32 + 1) * 32) {
      const u32 left_in_word = with_parts[group / 32] >> group % 32;
      if (left_in_word == 0) continue;
      group += __ffs(left_in_word) - 1;
      return true;
    }
    return false;
  }

  __device__ __forceinline__ bool find() {
    const bool pieced = number >= whole;
    const int wanted = pieced ? whole + (number - whole) / pieces : number;
    for (; next_with_parts(); ++group) {
      const int parts = parts_of(group);
      if (wanted < before + parts * cuts) {
        const int within = wanted - before, part = parts == 1 ? 0 : within / cuts, cut = within - part * cuts;
        const int start = offsets[group], rows = offsets[group + 1] - start;
        // Split evenly: a tile of few tokens dequantizes as many weights as one of many.
        const int tokens = parts == 1 ? rows : ceil_div(ceil_div(rows, parts), 8) * 8;
        const int local = part * tokens, unit = cut * units + min(cut, larger);
        tile = {group, start, local, min(rows - local, tokens), experts[group], unit, 0, 0};
        left = units + (cut < larger);
        if (pieced) {
          const int piece = (number - whole) % pieces, first = left * piece / pieces;
          tile.unit += first;
          left = left * (piece + 1) / pieces - first;
        }
        number = following(number);
        return true;
      }
      before += parts * cuts;
    }
    return false;
  }

  // The next tile; after the last, one without rows.
  __device__ __forceinline__ void next(Tile& next) {
    tile.unit += tile.high;
    if (left == 0 && !find()) {
      next.rows = 0;
      return;
    }
    tile.high = left <= TILE_UNITS ? left : ceil_div(left, ceil_div(left, TILE_UNITS));
    left -= tile.high;
    next = tile;
  }
};

// Marks the groups that have parts, and returns the number of all parts. For a whole warp.
__device__ __forceinline__ int mark_groups(Walk& walk, int num_groups) {
  const int lane = threadIdx.x & 31;
  int parts = 0;
  for (int first = 0; first < num_groups; first += 32) {
    const int group = first + lane, own = group < num_groups ? walk.parts_of(group) : 0;
    const u32 with_parts = __ballot_sync(0xFFFFFFFF, own > 0);
    if (lane == 0) walk.with_parts[first / 32] = with_parts;
    parts += own;
  }
  if (lane == 0) walk.num_groups = num_groups;
  __syncwarp();
  return __reduce_add_sync(0xFFFFFFFF, parts);
}

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
                                        u32 parity, float (*turned)[8 * MOST_AT_A_TIME][TURNED_COLUMNS], TileScales* tile_scales,
                                        const Requantization& with) {
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
        // The products of the previous stage are done only now.
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
  finish<BLOCKS>(p, tile, scales, with, warpgroup, acc, turned[warpgroup]);
}

// `consume` where warps multiply: a tile of 64 weight rows and at most 8 tokens. The sums have the order of `consume`.
template <bool SPECIAL_VALUES>
__device__ __forceinline__ void consume_by_warps(const Problem& p, const Tile& tile, u32 stages, u32 full, u32 empty, int stage,
                                                 u32 parity, float (*turned)[TURNED_COLUMNS], TileScales& scales,
                                                 const Requantization& with) {
  const int thread = threadIdx.x;
  scales.copy(p, tile);
  float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  const u32 first_quants = stages + thread * 16, first_tokens = stages + WEIGHT_STAGE + (thread & 31) * 4;
  const int to_scales = QUANT_BYTES + (W_FMT == NVFP4 ? thread * 2 : thread / 2 * 2) - thread * 16;
  for (int k64 = 0; k64 < p.units; k64 += STAGE_K64) {
    barrier_wait(full + stage * 8, parity);
    const u32 quants_at = first_quants + stage * STAGE_BYTES, tokens_at = first_tokens + stage * STAGE_BYTES;
    Unit<SPECIAL_VALUES> units[2];
    u32 tokens[2][8];
    auto load_part = [&](int part) {
      units[part % 2].load(quants_at + part * UNIT_BYTES, quants_at + part * UNIT_BYTES + to_scales);
      // Core matrices are 8 tokens of 8 columns, so a lane's word of a matrix is at four times its number.
#pragma unroll
      for (int i = 0; i < 8; ++i) tokens[part % 2][i] = load_4(tokens_at + part * TOKEN_BYTES + i * 128);
    };
    load_part(0);
#pragma unroll
    for (int part = 0; part < STAGE_K64; ++part) {
      if (part + 1 < STAGE_K64) load_part(part + 1);
      else barrier_arrive_warp(empty + stage * 8);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        u32 a[4];
        units[part % 2].dequantize(step, a);
        warp_product(acc, a, tokens[part % 2][2 * step], tokens[part % 2][2 * step + 1]);
      }
    }
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  finish<1>(p, tile, scales, with, 0, acc, turned);
}

extern "C" __global__ void __launch_bounds__(WARPGROUPS * 128 + PRODUCERS, BLOCKS_PER_SM)
    dequant_gemm(const u8* tokens, const u8* weights, const float* row_scale, const float* expert_scales,
                 const float* bias, const int* group_offsets, const int* expert_ids, const int* num_active, void* out,
                 u8* out_scales, const float* out_gsf, float* out_row_scale, const int* out_scale_offsets,
                 int num_groups, int num_experts, int capacity, int columns, int units, int unit_rows,
                 int token_blocks, long long out_stride, int scales_per_expert, int gate_up_order, const u8* special_values,
                 u32* counters, int first_overlapped, int team) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(8) u64 barriers[2 * STAGES + TILES_AHEAD];
  __shared__ __align__(16) float turned[ACTIVATED ? WARPGROUPS : 1][8 * MOST_AT_A_TIME][TURNED_COLUMNS];
  __shared__ TileScales tile_scales[WARPGROUPS];
  __shared__ Requantization with;
  __shared__ Walk walk;
  __shared__ Tile tiles[TILES_AHEAD];
  // An announcement overwrites the one of TILES_AHEAD tiles ago. That is safe: a warp that still reads it holds the stages of
  // the later tiles.
  static_assert(TILES_AHEAD >= STAGES + 2, "tiles that a block may be ahead");
  const u32 full = shared_address(barriers), empty = full + STAGES * 8, announced = empty + STAGES * 8;
  const u32 stages = shared_address(memory);
  // The next kernel is the product that reads these results. It waits for them, and may load its weights before.
  if (OUT_DEQUANTIZED) asm volatile("griddepcontrol.launch_dependents;");
  if (num_active) num_groups = min(num_groups, max(*num_active, 0));
  for (int g = threadIdx.x; g <= num_groups; g += blockDim.x) {
    walk.offsets[g] = min(max(group_offsets[g], 0), capacity);
    if (g < num_groups) walk.experts[g] = expert_ids[g] < num_experts ? expert_ids[g] : -1;
  }
  if (threadIdx.x == WARPGROUPS * 128) walk.prepare(unit_rows, counters);
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, 4 * WARPGROUPS * ARRIVALS_OF_WARP);
    }
    for (int s = 0; s < TILES_AHEAD; ++s) barrier_init(announced + s * 8, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  const Problem p = {tokens,  weights, row_scale,   expert_scales,     bias,    out,
                     out_scales, out_scale_offsets, columns, GATED ? 2 * columns : columns,
                     units,   unit_rows, token_blocks, out_stride, scales_per_expert, gate_up_order};
  int stage = 0;
  u32 parity = 0;
  if (threadIdx.x >= WARPGROUPS * 128) {
    if (!WARP_PRODUCTS) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(WARPGROUPS == 4 ? 32 : 40));
    if (threadIdx.x >= WARPGROUPS * 128 + 32) return;
    const int lane = threadIdx.x & 31;
    const int parts = mark_groups(walk, num_groups);
    if (lane == 0) walk.begin(parts, unit_rows);
    const u64 of_weights = KEEP_TOKENS ? policy_of_first_out() : 0, of_tokens = KEEP_TOKENS ? policy_of_last_out() : 0;
    bool early = true;
    for (int number = 0;; ++number) {
      Tile& tile = tiles[number % TILES_AHEAD];
      if (lane == 0) walk.next(tile);
      __syncwarp();
      // The load of the marks stays in flight until the first loads of the tile have started: only `announce` reads `mark`.
      u32 mark = 0;
      if (W_FMT != NVFP4 && tile.rows > 0) {
        mark = special_values[static_cast<long long>(tile.expert) * unit_rows + tile.unit + min(lane, tile.high - 1)];
      }
      bool pending = true;
      auto announce = [&] {
        if (W_FMT != NVFP4) {
          asm volatile("" : "+r"(mark));  // otherwise `mark` is compared where it is loaded, and the warp waits there
          const u32 marks = __ballot_sync(0xFFFFFFFF, mark != 0);
          if (lane == 0) tile.special_values = marks;
        }
        if (lane == 0) barrier_arrive(announced + number % TILES_AHEAD * 8);
        pending = false;
      };
      if (W_FMT == NVFP4 || tile.rows == 0) announce();
      if (tile.rows == 0) break;
      const int blocks = (tile.rows + 7) / 8;
      const u8* w = weights + (static_cast<long long>(tile.expert) * units * unit_rows + tile.unit * CHUNK) * UNIT_BYTES;
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
               w + static_cast<long long>(k64 + lane * CHUNK) * unit_rows * UNIT_BYTES, tile.high * CHUNK * UNIT_BYTES, to_stage,
               of_weights);
        }
      };
      auto load_tokens = [&](int k64, int to_stage) {
        if (lane < STAGE_K64) {
          load(stages + to_stage * STAGE_BYTES + WEIGHT_STAGE + lane * TOKEN_BYTES,
               t + static_cast<long long>(k64 + lane) * token_blocks * BLOCK_BYTES, blocks * BLOCK_BYTES, to_stage, of_tokens);
        }
      };
      int k64 = 0;
      if (OVERLAPPED) await_tokens(counters, static_cast<int>(tile.token_block()) - first_overlapped, blocks, team);
      if (!OVERLAPPED && early) {
        // Weights do not depend on the previous kernel, which may still be dequantizing the tokens.
        const int ahead = min(STAGES, units / STAGE_K64);
        for (int s = 0; s < ahead; ++s) load_weights(s * STAGE_K64, s);
        if (pending) announce();
        asm volatile("griddepcontrol.wait;" ::: "memory");
        for (; stage < ahead; ++stage, k64 += STAGE_K64) load_tokens(k64, stage);
        if (stage == STAGES) stage = 0, parity ^= 1;
        early = false;
      }
      for (; k64 < units; k64 += STAGE_K64) {
        barrier_wait(empty + stage * 8, parity ^ 1);
        load_weights(k64, stage);
        load_tokens(k64, stage);
        if (pending) announce();
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
    }
    // Even without a tile, this kernel must not end before the one that it overlaps. With OVERLAPPED, that kernel started
    // after all kernels before it had ended, so waiting for its end is enough.
    if (early) asm volatile("griddepcontrol.wait;" ::: "memory");
  } else {
    if (!WARP_PRODUCTS) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WARPGROUPS == 2 ? 232 : 112));
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
    for (int number = 0;; ++number) {
      barrier_wait(announced + number % TILES_AHEAD * 8, number / TILES_AHEAD & 1);
      const Tile& tile = tiles[number % TILES_AHEAD];
      const int blocks = (tile.rows + 7) / 8;
      if (blocks == 0) break;
#if WARP_PRODUCTS
      if (W_FMT != NVFP4 && (tile.special_values & 1)) {
        consume_by_warps<true>(p, tile, stages, full, empty, stage, parity, turned[0], tile_scales[0], with);
      } else {
        consume_by_warps<false>(p, tile, stages, full, empty, stage, parity, turned[0], tile_scales[0], with);
      }
#else
      if (warpgroup >= tile.high) {
        skip(units, full, empty, stage, parity);
      } else if (W_FMT != NVFP4 && (tile.special_values >> warpgroup & 1)) {
        consume<MAX_BLOCKS, true>(p, tile, stages, full, empty, stage, parity, turned, tile_scales, with);
      } else {
#define CASE(N) \
  if (blocks <= N) consume<N>(p, tile, stages, full, empty, stage, parity, turned, tile_scales, with); else
        CASES consume<MAX_BLOCKS>(p, tile, stages, full, empty, stage, parity, turned, tile_scales, with);
      }
#endif
      stage += units / STAGE_K64;
      parity ^= stage / STAGES & 1;
      stage %= STAGES;
    }
  }
}
