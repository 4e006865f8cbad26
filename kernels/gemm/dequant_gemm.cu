// Grouped GEMM that dequantizes its weights in registers, for sm_90a. dequant_layout.py has the layout, dequant_gemm.py the
// measurements.
//
// The weights are the M side of wgmma. Each thread reads its 16 bytes of quants in the order of wgmma's A operand,
// dequantizes them to bf16 in registers, and multiplies by bf16 tokens in shared memory. One producer warp walks the tiles
// and streams weights and tokens through a ring of stages. Each consumer warpgroup owns its weight rows.
//
// With WARP_PRODUCTS each warp multiplies its 16 weight rows by `mma.sync` instead. For operands of bf16 it gives the bits of
// `wgmma` (tests/kernels/test_dequant_gemm.py). A block is then small enough that an SM has several, whose warps hide each other's
// latencies.
//
// Macros:
//   W_FMT, OUT_FMT (FormatCode), OUT_TYPE (0 bf16, 1 fp16, 2 fp32; of a plain result), ACTIVATED (the result is activated
//   and in OUT_FMT), GATED (and the weights are gate and up), FUNCTION (ActivationFunction.code),
//   OUT_DEQUANTIZED (activated results as dequant_tokens.cu would make them), ROW_SCALES, EXPERT_SCALES, BIAS (which exist),
//   WARPGROUPS (64 weight rows of a tile each), WARP_PRODUCTS, BLOCKS_PER_SM, STAGES, STAGE_K64 (columns of a stage / 64; divides `units`),
//   CHUNK (columns of a chunk of weights / 64; divides STAGE_K64), BATCH (steps of 16 columns that are dequantized before
//   they are multiplied), BUFFERS (dequantized batches that are held), ROLLING (wait for the oldest buffer; otherwise the
//   last of BUFFERS and of a stage waits for all), MAX_BLOCKS (tokens of a tile / 8), CASES (smaller numbers of blocks with
//   specialized code), MAX_GROUPS, SCALED_TOKENS (tokens are 2^100 times their value), KEEP_TOKENS (L2 keeps tokens and
//   evicts weights first), OVERLAPPED (dequant_tokens.cu dequantizes tokens while this kernel runs, and counts them), ALPHA,
//   LIMIT, UP_OFFSET, GATE_SOFTCAP, UP_SOFTCAP (of `Activation`; none of them if not defined).

#include "activation.cuh"
#include "clock.cuh"
#include "mbarrier.cuh"

constexpr bool E2M1 = W_FMT != MXFP8;
constexpr int QUANT_BYTES = E2M1 ? 2048 : 4096;  // 64 rows x 64 columns
constexpr int SCALE_BYTES = W_FMT == NVFP4 ? 256 : 128;
constexpr int UNIT_BYTES = QUANT_BYTES + SCALE_BYTES;
constexpr int TILE_UNITS = WARPGROUPS;
constexpr int TILE_TOKENS = 8 * MAX_BLOCKS;
constexpr int BLOCK_BYTES = 64 * 8 * 2;  // of 8 tokens and 64 columns
constexpr int TOKEN_BYTES = MAX_BLOCKS * BLOCK_BYTES;
constexpr int WEIGHT_STAGE = TILE_UNITS * STAGE_K64 * UNIT_BYTES;
constexpr int STAGE_BYTES = WEIGHT_STAGE + STAGE_K64 * TOKEN_BYTES;
constexpr int UNIT_COLUMNS = GATED ? 32 : 64;  // of a result, from 64 weight rows
constexpr int TURNED_COLUMNS = UNIT_COLUMNS + 4;  // with padding, so that rows start in different banks
constexpr int TOKEN_LANES = UNIT_COLUMNS / 4;  // threads that share a token after the transposition
constexpr int STORED_BLOCKS = 16 / TOKEN_LANES;  // blocks of tokens that a warpgroup stores at a time
constexpr int MOST_AT_A_TIME = (MAX_BLOCKS > 8 ? 2 : 1) * STORED_BLOCKS;  // blocks of tokens that are transposed at a time
constexpr int TILES_AHEAD = 8;  // tiles that the producer may announce in advance
constexpr int PRODUCERS = WARP_PRODUCTS ? 32 : 128;  // threads; of 128 only a warp loads
constexpr long long PATIENCE_NS = 30'000'000'000;
constexpr u32 LANES = 0x81C081C0;  // sign and magnitude of an e2m1 value in both bf16 halves

__device__ __forceinline__ u32 load_4(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

__device__ __forceinline__ uint4 load_16(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
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

// Starts the copy of one value into shared memory while the tile is summed; `finish_copies` waits for a thread's copies.
__device__ __forceinline__ void copy_ahead(float* to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void finish_copies(int barrier) {
  asm volatile("cp.async.wait_all;" ::: "memory");
  asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
}

// Combines the bits of two words as SLOTS of dequant_layout.py needs them. Written with operators, ptxas would split the mask
// again for each use.
__device__ __forceinline__ u32 selected(u32 even, u32 odd) {
  u32 both;
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(both) : "r"(even), "r"(odd), "n"(0xC180C180));  // `even` where the mask has ones
  return both;
}

// Multiplies a pair of e4m3 values, given as bf16 bits of 2^-120 times their value, by 2^120. Keeps NaN.
__device__ __forceinline__ u32 any_e4m3(u32 pair) {
  const u32 nan = ((pair & 0x07F007F0) + 0x00100010) & 0x08000800;  // a bit for each value with all bits set
  return multiply(pair, 0x7B807B80) | ((nan << 4) - (nan >> 4));
}

// The A operands of wgmma from the quants of 64 columns: 16 values of row r and of row r + 8 for each thread. Without
// SPECIAL_VALUES, MXFP8 weights and scales hold no NaN, and scales are at most 2^7 (MXFP4: 2^1).
template <bool SPECIAL_VALUES>
struct Unit {
  uint4 quants[QUANT_BYTES / 2048];
  u16 scales[2];  // bf16, of row r and r + 8

  __device__ __forceinline__ void load(u32 quants_at, u32 scales_at) {
    for (int i = 0; i < QUANT_BYTES / 2048; ++i) quants[i] = load_16(quants_at + i * 2048);
    u16 bytes;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bytes) : "r"(scales_at));
    if (W_FMT == NVFP4) {
      // SCALE_CODES of dequant_layout.py, shifted left by 4: bf16 bits of 2^-106 times the scale.
      const u32 codes = __byte_perm(bytes, 0, 0x4140) * 16;
      // 2^10 times the scale. 2^-11 stands for 0: its products are less than half of the smallest bf16 value.
      u32 pair = codes + 0x3A003A00;
      if (!SCALED_TOKENS) pair = multiply(multiply(codes, 0x77807780), 0x77807780);  // 2^118 times the scale, by 2^112 twice
      asm("mov.b32 {%0, %1}, %2;" : "=h"(scales[0]), "=h"(scales[1]) : "r"(pair));
    } else if (SPECIAL_VALUES) {
      scales[0] = static_cast<u16>(e8m0_pair(bytes & 255));
      scales[1] = static_cast<u16>(e8m0_pair(bytes >> 8));
    } else {
      // 2^120 times the scale (MXFP4: 2^126).
      const u32 pair = __byte_perm(bytes, 0, 0x4140) * 128 + (W_FMT == MXFP4 ? 0x3F003F00 : 0x3C003C00);
      asm("mov.b32 {%0, %1}, %2;" : "=h"(scales[0]), "=h"(scales[1]) : "r"(pair));
    }
  }

  // The pair of e2m1 values in LANES of `word`, which are bf16 bits of 2^-126 times their value, times a scale.
  static __device__ __forceinline__ u32 e2m1(u32 word, u32 scale) {
    const u32 pair = word & LANES;
    return multiply(SPECIAL_VALUES ? multiply(pair, 0x7E807E80) : pair, scale);
  }

  // Columns 4 * step .. 4 * step + 3 of the 16 of each thread.
  __device__ __forceinline__ void dequantize(int step, u32 (&a)[4]) const {
    // Only with these moves does the compiler use halves of a register as operands of multiplications.
    u32 scale[2];
    for (int half = 0; half < 2; ++half) asm("mov.b32 %0, {%1, %1};" : "=r"(scale[half]) : "h"(scales[half]));
    if (E2M1) {
      // SLOTS of dequant_layout.py gives the positions of the bits of the four values of each half: in the words of an even
      // and an odd step, and in `both`, which has bits of either.
      const u32 even = step < 2 ? quants[0].x : quants[0].z, odd = step < 2 ? quants[0].y : quants[0].w;
      const u32 both = selected(even, odd);
      if (step % 2 == 0) {
        a[0] = e2m1(even << 2, scale[0]);
        a[1] = e2m1(even << 6, scale[1]);
        a[2] = e2m1(__funnelshift_r(even, even, 4), scale[0]);
        a[3] = e2m1(both, scale[1]);
      } else {
        a[0] = e2m1(odd << 4, scale[0]);
        a[1] = e2m1(__funnelshift_r(odd, odd, 24), scale[1]);
        a[2] = e2m1(__funnelshift_r(odd, odd, 2), scale[0]);
        a[3] = e2m1(__funnelshift_r(both, both, 6), scale[1]);
      }
    } else {
      const uint4 q = quants[QUANT_BYTES == 4096 ? step >> 1 : 0];
      const u32 rows[2] = {step & 1 ? q.z : q.x, step & 1 ? q.w : q.y};
      for (int half = 0; half < 2; ++half) {
        // BYTE_SLOTS of dequant_layout.py.
        const u32 word = rows[half];
        u32 pairs[2] = {word & 0x87F087F0, ((word << 4) & 0x80F080F0) | ((word >> 4) & 0x07000700)};
        for (int i = 0; i < 2; ++i) a[2 * i + half] = multiply(SPECIAL_VALUES ? any_e4m3(pairs[i]) : pairs[i], scale[half]);
      }
    }
  }
};

struct Problem {
  const u8* tokens;
  const u8* weights;
  const float* row_scale;
  const float* expert_scales;
  const float* bias;
  void* out;
  u8* out_scales;
  const int* out_scale_offsets;
  int columns;  // of the output
  int num_rows;  // of a weight: twice `columns` if gated
  int units;  // of 64 columns
  int unit_rows;
  int token_blocks;  // of all groups, in the dequantized tokens
  long long out_stride;
  int scales_per_expert;
  int gate_up_order;  // 1 gate | up, 2 up | gate, 3 interleaved; not read unless gated
};

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

// A tile of the output: `rows` tokens of a group from its token `local`, and `high` units of weight rows from `unit`.
struct Tile {
  int group, start, local, rows, expert, unit, high;
  u32 special_values;  // a bit for each unit of rows

  __device__ __forceinline__ long long token_block() const { return (start + 7 * group) / 8 + local / 8; }
};

// a / b for 0 <= a < 2^20 and b > 0: the instruction's quotient has a relative error below 2^-21.
__device__ __forceinline__ int fast_divided(int a, int b) { return static_cast<int>(__fdividef(a + 0.5f, b)); }

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

// Scales that the epilogue of a tile reads, one for each warpgroup.
struct alignas(8) TileScales {
  float rows[TILE_TOKENS];
  float experts[2];
  int scale_offset;

  // Row scales of this thread's two tokens in a block of 8.
  __device__ __forceinline__ float2 of_block(int block) const {
    return reinterpret_cast<const float2*>(rows)[4 * block + (threadIdx.x & 3)];
  }

  __device__ __forceinline__ void copy(const Problem& p, const Tile& tile) {
    const int thread = threadIdx.x & 127;
    for (int i = thread; ROW_SCALES && i < tile.rows; i += 128) {
      copy_ahead(rows + i, p.row_scale + tile.start + tile.local + i);
    }
    if (EXPERT_SCALES && thread < p.scales_per_expert) {
      copy_ahead(experts + thread, p.expert_scales + tile.expert * p.scales_per_expert + thread);
    }
    if (thread == 3 && p.out_scale_offsets) {
      copy_ahead(reinterpret_cast<float*>(&scale_offset), reinterpret_cast<const float*>(p.out_scale_offsets + tile.group));
    }
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

__device__ __forceinline__ float finished(const Problem& p, float acc, float row_scale, float expert_scale, int bias_at) {
  // Weights are 2^-126 times their value; scales and tokens carry factors that cancel most of that.
  if (W_FMT == NVFP4) acc = __fmul_rn(acc, SCALED_TOKENS ? 0x1p16f : 0x1p8f);
  if (ROW_SCALES) acc = __fmul_rn(acc, row_scale);
  if (EXPERT_SCALES) acc = __fmul_rn(acc, expert_scale);
  return BIAS ? __fadd_rn(acc, p.bias[bias_at]) : acc;
}

// x * sigmoid(slope), given `exponent`, -slope / ln 2.
__device__ __forceinline__ float times_sigmoid(float x, float exponent) {
  float power, inverse;  // e^(-slope); the instruction flushes denormals to 0
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
  // This instruction flushes below 2^-126, too: a slope under -87.3 gives 0; exact would be about -5e-37.
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(__fadd_rn(1.0f, power)));
  return __fmul_rn(x, inverse);
}

// x * sigmoid(ALPHA * gate).
__device__ __forceinline__ float silu(float gate, float x) { return times_sigmoid(x, __fmul_rn(gate, -ALPHA * 0x1.715476p+0f)); }

// The activation function of gate, or of up where there is no gate.
__device__ __forceinline__ float function_of(float x) {
  if (FUNCTION == RELU2) return squared_relu(x);
  if (FUNCTION == GELU) return gelu(x);
  if (FUNCTION == GELU_TANH) return times_sigmoid(x, __fmul_rn(gelu_tanh_slope(x), -0x1.715476p+0f));
  return silu(x, x);
}

__device__ __forceinline__ float activated(float gate, float up) {
#ifdef LIMIT
  gate = gate > LIMIT ? LIMIT : gate;
  up = up > LIMIT ? LIMIT : (up < -LIMIT ? -LIMIT : up);
#endif
#ifdef UP_SOFTCAP
  up = softcapped(up, UP_SOFTCAP);
#endif
  if (UP_OFFSET != 0.0f) up = __fadd_rn(up, UP_OFFSET);
#ifdef GATE_SOFTCAP
  return __fmul_rn(silu(gate, softcapped(gate, GATE_SOFTCAP)), up);
#else
  return __fmul_rn(function_of(gate), up);
#endif
}

// An encode scale clamped to MAX_ENCODE_SCALE of number_formats.py.
__device__ __forceinline__ float clamped(float gsf) { return gsf > 0x1p100f ? 0x1p100f : gsf; }

// Bits of e4m3, rounded to nearest even; x is finite and at most 448.
__device__ __forceinline__ u32 e4m3_code(float x) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return pair & 255;
}

// Bits of e2m1, rounded to nearest, ties to even, and saturating; x is no NaN.
__device__ __forceinline__ u32 e2m1_code(float x) {
  const float a = fabsf(x);
  const u32 code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return code | ((__float_as_uint(x) >> 28) & 8);
}

__device__ __forceinline__ bool is_finite(float magnitude) { return __float_as_uint(magnitude) < 0x7F800000u; }

// The larger magnitude; NaN if either is NaN.
__device__ __forceinline__ float larger_magnitude(float a, float b) {
  float d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(fabsf(a)), "f"(fabsf(b)));
  return d;
}

// The largest magnitude of the values that share a scale: four in each of LANES neighbouring lanes.
template <int LANES>
__device__ __forceinline__ float largest_magnitude(const float4& h) {
  float amax = larger_magnitude(larger_magnitude(h.x, h.y), larger_magnitude(h.z, h.w));
#pragma unroll
  for (int lanes = 1; lanes < LANES; lanes *= 2) amax = larger_magnitude(amax, __shfl_xor_sync(0xFFFFFFFF, amax, lanes));
  return amax;
}

// The e8m0 scale of MXFP8 for values up to `amax`.
struct MxScale {
  u32 byte;
  bool finite;

  __device__ __forceinline__ MxScale(float amax) : finite(is_finite(amax)) {
    const float ideal = divide(fmaxf(finite ? amax : 0.0f, 0x1.a36e2ep-14f), 448.0f, 1.0f / 448.0f);  // amax at least 1e-4
    byte = finite ? (__float_as_uint(ideal) + 0x7FFFFF) >> 23 : 255;
  }

  __device__ __forceinline__ u32 codes(const float4& h) const {
    if (!finite) return 0;
    const float factor = __uint_as_float((254 - byte) << 23);
    return e4m3_code(__fmul_rn(h.x, factor)) | e4m3_code(__fmul_rn(h.y, factor)) << 8 |
           e4m3_code(__fmul_rn(h.z, factor)) << 16 | e4m3_code(__fmul_rn(h.w, factor)) << 24;
  }
};

// How NVFP4 values of a block with a given e4m3 scale are quantized and dequantized again.
struct alignas(16) OfScale {
  float factor;       // applied to values before they are rounded to e2m1
  float dequantized;  // factor of e2m1 values that gives tokens, 2^100 times their value
  u32 sign;           // mask of the sign bit
  u32 unused;
};

// In shared memory, for all results: their encode scale, and an entry for each scale that a block can have.
struct Requantization {
  float gsf;
  OfScale of_scale[OUT_FMT == NVFP4 && ACTIVATED ? 128 : 1];

  __device__ __forceinline__ void prepare(float gsf, int code) {
    float scale, unused;
    e4m3_pair(code, scale, unused);  // 127 is NaN, for values that are not finite
    // Values too small for any scale become zeros without signs.
    const bool none = code == 0 || code == 127;
    of_scale[code] = {none ? 0.0f : __fdiv_rn(gsf, scale), __fmul_rn(scale, 0x1p100f), none ? 0u : 0x80000000u, 0u};
  }

  // The scale code for values up to `amax`, without the sign of a negative encode scale. With a negative one, the codes of
  // the values have the opposite sign, as does the row scale.
  __device__ __forceinline__ u32 scale_code(float amax) const {
    const u32 code = e4m3_code(fminf(divide(__fmul_rn(gsf, amax), 6.0f, 1.0f / 6.0f), 448.0f)) & 127;
    return is_finite(amax) ? code : 127;
  }
};

// x rounded to e2m1, ties to even, times OfScale::dequantized.
__device__ __forceinline__ float rounded_to_e2m1(float x, const OfScale& of_scale) {
  // e2m1 values from 2^e on are 2^(e-1) apart, those below 1 as far apart as from 1 on: like fp32 values from 2^(e+22) on.
  const float magnitude = fminf(fabsf(x), 6.0f);
  const float power = __uint_as_float(max(__float_as_uint(magnitude) & 0x7F800000u, 0x3F800000u));
  const float rounded = __fmaf_rn(power, -0x1.8p22f, __fmaf_rn(power, 0x1.8p22f, magnitude));
  return __uint_as_float(__float_as_uint(__fmul_rn(rounded, of_scale.dequantized)) | (__float_as_uint(x) & of_scale.sign));
}

// Stores four columns of a token in the layout of dequant_tokens.cu.
__device__ __forceinline__ void store_dequantized(u8* to, bool live, u32 low, u32 high) {
  if (!live) return;
  *reinterpret_cast<u32*>(to) = low;
  *reinterpret_cast<u32*>(to + 128) = high;
}

// Quantizes four columns of a token and stores them dequantized at `to`. Lanes that share a scale are neighbours.
__device__ __forceinline__ void requantize_and_dequantize(const Requantization& with, u8* to, bool live, float4 h) {
  if (OUT_FMT == BF16) {
    store_dequantized(to, live, pack_bf16(h.x, h.y), pack_bf16(h.z, h.w));
  } else if (OUT_FMT == NVFP4) {
    const OfScale of_scale = with.of_scale[with.scale_code(largest_magnitude<4>(h))];
    auto pair = [&](float low, float high) {
      return pack_bf16(rounded_to_e2m1(__fmul_rn(low, of_scale.factor), of_scale),
                       rounded_to_e2m1(__fmul_rn(high, of_scale.factor), of_scale));
    };
    store_dequantized(to, live, pair(h.x, h.y), pair(h.z, h.w));
  } else {
    const MxScale mx(largest_magnitude<8>(h));
    const u32 codes = mx.codes(h), scale = e8m0_pair(mx.byte);
    store_dequantized(to, live, e4m3_decoded(codes, scale), e4m3_decoded(codes >> 16, scale));
  }
}

// Quantizes four columns from `column` on of token `local` of a group, and stores codes and scales.
__device__ __forceinline__ void requantize(const Problem& p, const Tile& tile, const TileScales& scales,
                                           const Requantization& with, int local, bool live, int column, float4 h) {
  const long long position = tile.start + local;
  if (OUT_FMT == BF16) {
    u16* to = static_cast<u16*>(p.out) + position * p.columns + column;
    if (live) *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16(h.x, h.y), pack_bf16(h.z, h.w));
    return;
  }
  const long long scale_row = (tile.start / 128 + static_cast<long long>(scales.scale_offset)) * 128 + local;
  if (OUT_FMT == NVFP4) {
    const u32 code = with.scale_code(largest_magnitude<4>(h));
    const OfScale of_scale = with.of_scale[code];
    if (of_scale.sign == 0) h = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float factor = of_scale.factor;
    u32 codes = e2m1_code(__fmul_rn(h.x, factor)) | e2m1_code(__fmul_rn(h.y, factor)) << 4 |
                e2m1_code(__fmul_rn(h.z, factor)) << 8 | e2m1_code(__fmul_rn(h.w, factor)) << 12;
    codes |= __shfl_down_sync(0xFFFFFFFF, codes, 1) << 16;
    if (live && threadIdx.x % 2 == 0) {
      *reinterpret_cast<u32*>(static_cast<u8*>(p.out) + position * (p.columns / 2) + column / 2) = codes;
    }
    if (live && threadIdx.x % 4 == 0) {
      p.out_scales[swizzled_offset(scale_row, column / 16, (p.columns + 15) / 16)] = code;
    }
  } else {
    const MxScale mx(largest_magnitude<8>(h));
    if (live) *reinterpret_cast<u32*>(static_cast<u8*>(p.out) + position * p.columns + column) = mx.codes(h);
    if (live && threadIdx.x % 8 == 0) {
      p.out_scales[swizzled_offset(scale_row, column / 32, (p.columns + 31) / 32)] = mx.byte;
    }
  }
}

// Two columns of a plain result.
__device__ __forceinline__ void store_plain(void* to, float c0, float c1) {
  if (OUT_TYPE == 2) {
    *static_cast<float2*>(to) = make_float2(c0, c1);
  } else if (OUT_TYPE == 1) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(c1), "f"(c0));
    *static_cast<u32*>(to) = pair;
  } else {
    *static_cast<u32*>(to) = pack_bf16(c0, c1);
  }
}

// The first of a thread's two tokens in a block of 8. Accumulators c[0] and c[1] belong to these tokens and one weight row.
// c[2] and c[3] belong to the same tokens and the next row of a plain weight, or to up where c[0] and c[1] belong to gate.
__device__ __forceinline__ int first_token() { return (threadIdx.x & 3) * 2; }

// All loops are unrolled, because in a real loop accumulators would have to move between registers. The code for each value
// is short, so that all of it fits into the instruction cache.
template <int BLOCKS>
__device__ __forceinline__ void finish_plain(const Problem& p, const Tile& tile, const TileScales& scales, int unit,
                                             const float (&acc)[4 * BLOCKS]) {
  const int thread = threadIdx.x & 127, column = unit * 64 + thread / 32 * 16 + (thread & 31) / 4 * 2;
  const int bias_at = tile.expert * p.num_rows + (column < p.columns ? column : 0);
  const int live = column < p.columns ? tile.rows - first_token() : 0;
  const long long stride = p.out_stride * (OUT_TYPE == 2 ? 4 : 2);
  const long long position = tile.start + tile.local + first_token();
  u8* to = static_cast<u8*>(p.out) + position * stride + column * (OUT_TYPE == 2 ? 4 : 2);
  const float expert_scale = scales.experts[0];
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block) {
    const float* c = acc + 4 * block;
    const float2 row_scales = scales.of_block(block);
    const float c0 = finished(p, c[0], row_scales.x, expert_scale, bias_at);
    const float c1 = finished(p, c[1], row_scales.y, expert_scale, bias_at);
    const float c2 = finished(p, c[2], row_scales.x, expert_scale, bias_at + 1);
    const float c3 = finished(p, c[3], row_scales.y, expert_scale, bias_at + 1);
    if (8 * block < live) store_plain(to, c0, c2);
    if (8 * block + 1 < live) store_plain(to + stride, c1, c3);
    to += 8 * stride;
  }
}

// The activation of 8 * STEP tokens at a time, transposed through `turned` so that a thread has four columns of one token.
template <int BLOCKS>
__device__ __forceinline__ void finish_activated(const Problem& p, const Tile& tile, const TileScales& scales,
                                                 const Requantization& with, int unit, const float (&acc)[4 * BLOCKS],
                                                 float (*turned)[TURNED_COLUMNS]) {
  constexpr int STEP = BLOCKS % MOST_AT_A_TIME == 0 ? MOST_AT_A_TIME : BLOCKS % 2 ? 1 : 2;
  const int warpgroup = threadIdx.x / 128, thread = threadIdx.x & 127, warp = thread / 32, lane = thread & 31;
  const float first_scale = scales.experts[0], up_scale = GATED ? scales.experts[p.scales_per_expert > 1] : first_scale;
  // This thread has a column of gate and up, or two columns.
  constexpr int OWN = UNIT_COLUMNS / 32;
  const int bias_base = tile.expert * p.num_rows, column = unit * UNIT_COLUMNS + warp * 8 * OWN + lane / 4 * OWN;
  int first_row = column, second_row = GATED ? column : column + 1;
  if (GATED && p.gate_up_order == 3) first_row = 2 * column, second_row = 2 * column + 1;
  if (GATED && p.gate_up_order == 1) second_row += p.columns;
  if (GATED && p.gate_up_order == 2) first_row += p.columns;
  if (column >= p.columns) first_row = second_row = 0;
  float* turned_to = turned[first_token()] + warp * 8 * OWN + lane / 4 * OWN;
  // The columns of this thread after the transposition.
  const int token = thread / TOKEN_LANES, first = unit * UNIT_COLUMNS + thread % TOKEN_LANES * 4;
  const int live = first < p.columns ? tile.rows - token : 0;
  const float4* of_token = reinterpret_cast<const float4*>(turned[token] + thread % TOKEN_LANES * 4);
  const long long out_block = static_cast<long long>(first / 64) * p.token_blocks + tile.token_block() + token / 8;
  u8* out = static_cast<u8*>(p.out) + out_block * BLOCK_BYTES + first % 16 / 2 * 128 + token % 8 * 16 +
                first % 64 / 16 * 4;
#pragma unroll
  for (int block = 0; block < BLOCKS; block += STEP) {
    float h[2 * STEP * OWN];
#pragma unroll
    for (int b = 0; b < STEP; ++b) {
      const float* c = acc + 4 * (block + b);
      const float2 row_scales = scales.of_block(block + b);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float row_scale = i == 0 ? row_scales.x : row_scales.y;
        const float one = finished(p, c[i], row_scale, first_scale, bias_base + first_row);
        const float two = finished(p, c[2 + i], row_scale, up_scale, bias_base + second_row);
        if constexpr (GATED) {
          h[2 * b + i] = activated(one, two);
        } else {
          h[2 * (2 * b + i)] = function_of(one), h[2 * (2 * b + i) + 1] = function_of(two);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * STEP; ++i) {
      float* to = turned_to + (i / 2 * 8 + i % 2) * TURNED_COLUMNS;
      if constexpr (GATED) *to = h[i];
      else *reinterpret_cast<float2*>(to) = make_float2(h[2 * i], h[2 * i + 1]);
    }
    asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
    if (STEP >= STORED_BLOCKS || warp < 2) {
#pragma unroll
      for (int at = 0; at < STEP; at += STORED_BLOCKS) {
        const bool inside = 8 * (block + at) < live;
        const float4 h = of_token[at * 8 * TURNED_COLUMNS / 4];
        if (OUT_DEQUANTIZED) {
          requantize_and_dequantize(with, out + (block + at) * BLOCK_BYTES, inside, h);
        } else {
          requantize(p, tile, scales, with, tile.local + 8 * (block + at) + token, inside, first, h);
        }
      }
    }
    asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
  }
}

template <int BLOCKS>
__device__ __forceinline__ void finish(const Problem& p, const Tile& tile, const TileScales& scales, const Requantization& with,
                                       int warpgroup, const float (&acc)[4 * BLOCKS], float (*turned)[TURNED_COLUMNS]) {
  const int unit = tile.unit + warpgroup;
  finish_copies(1 + warpgroup);
  if (ACTIVATED) {
    finish_activated<BLOCKS>(p, tile, scales, with, unit, acc, turned);
  } else {
    finish_plain<BLOCKS>(p, tile, scales, unit, acc);
    asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
  }
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
