// Gathers the rows of a grouped GEMM and decodes them to bf16, once, in the order in which wgmma reads them.
//
// [K / 64][blocks of 8 tokens][8 pieces of columns][8 tokens][8 numbers], so that 64 columns of a tile lie in one piece; these
// 64 are in the order of decoded_layout.py.
// A group starts at block (group_offsets[g] + 7 * g) / 8. A warp takes such a block, so that what it stores at a time are
// whole lines, and 64 columns: lane = row * 4 + t has the columns 16 * t .. 16 * t + 15. Columns past K are zeros; NVFP4
// numbers are 2^100 times their value. Blocks of threads go from one of 8 tokens to another, no further than there are
// tokens: of a capacity, which is a worst case, most may be empty.
//
// Macros: THREADS of a block, MIN_BLOCKS (of an SM, for which registers are kept few; 0 leaves them to the compiler), AHEAD
// (pieces of a row that a thread loads before it decodes the first), FMT (FormatCode), MAX_GROUPS, SCALE_BLOCK, PACKED
// (ScaleLayout of the scales, else swizzled), BY_ROW (scales lie as the rows do, instead of either); `scale_ld` is the leading
// dimension of packed scales, or bytes between those of rows.

#include "numbers.cuh"

constexpr bool GROUP_SCALES = FMT != BF16 && !BY_ROW;
constexpr int WARPS = THREADS / 32;

// 16 columns of a row as they are stored; zeros where nothing was loaded.
struct Piece {
  u32 words[FMT == BF16 ? 8 : FMT == NVFP4 ? 2 : 4] = {};
  u32 scale = 0;

  __device__ __forceinline__ void load(const u8* row, int column, u32 scale_byte) {
    scale = scale_byte;
    if (FMT == NVFP4) {
      const uint2 quants = *reinterpret_cast<const uint2*>(row + column / 2);
      words[0] = quants.x, words[1] = quants.y;
    } else {
#pragma unroll
      for (int i = 0; i < (FMT == BF16 ? 2 : 1); ++i) {
        const uint4 part = reinterpret_cast<const uint4*>(row + column * (FMT == BF16 ? 2 : 1))[i];
        words[4 * i] = part.x, words[4 * i + 1] = part.y, words[4 * i + 2] = part.z, words[4 * i + 3] = part.w;
      }
    }
  }

  __device__ __forceinline__ void decode(u32 (&pairs)[8]) const {
    float low = 0.0f, high;
    if (FMT == NVFP4) e4m3_pair(scale, low, high);
    const u32 factor = FMT == NVFP4 ? e4m3_factor(low) : e8m0_pair(scale);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (FMT == BF16) {
        pairs[i] = words[i];
      } else if (FMT == NVFP4) {
        pairs[i] = e2m1_pair(words[i / 4] >> (8 * (i & 3)), factor);
      } else {
        pairs[i] = e4m3_decoded(words[i / 2] >> (16 * (i & 1)), factor);
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    decode_tokens(const u8* rows, const u8* scales, const int* row_index, const int* group_offsets,
                  const int* group_scale_offsets, const int* expert_ids, const int* num_active, u8* out, int num_groups,
                  int num_experts, int capacity, int columns,
                  int units, int token_blocks, int scale_ld, long long row_bytes) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  if (num_active) num_groups = min(num_groups, max(*num_active, 0));
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, t = lane & 3;
  __shared__ int offsets[MAX_GROUPS + 1], experts[MAX_GROUPS], scale_offsets[GROUP_SCALES ? MAX_GROUPS : 1];
  for (int g = threadIdx.x; g <= num_groups; g += blockDim.x) {
    offsets[g] = min(max(group_offsets[g], 0), capacity);
    if (g == num_groups) continue;
    experts[g] = expert_ids[g];
    if (GROUP_SCALES) scale_offsets[g] = group_scale_offsets[g];
  }
  __syncthreads();
  if (num_groups == 0) return;
  auto first_block = [&](int group) { return (offsets[group] + 7 * group) / 8; };
  for (int number = blockIdx.x; number < first_block(num_groups); number += gridDim.x) {
    // The last group that starts at or before the block, and so the one that is not empty.
    int group = 0;
    for (int high = num_groups; high - group > 1;) {
      const int middle = (group + high) / 2;
      if (first_block(middle) <= number) group = middle;
      else high = middle;
    }
    const int start = offsets[group], local = (number - first_block(group)) * 8 + lane / 4;
    // Nothing of a group that is skipped is read.
    if (local >= offsets[group + 1] - start || static_cast<u32>(experts[group]) >= static_cast<u32>(num_experts)) continue;
    const long long source = row_index ? row_index[start + local] : start + local;
    const u8* row = rows + source * row_bytes;
    const long long first = GROUP_SCALES ? scale_offsets[group] : 0;
    const long long scale_row = PACKED ? first + local : (start / 128 + first) * 128 + local;
    auto scale_byte = [&](int column) {
      const int v = column / SCALE_BLOCK;
      const long long at = BY_ROW   ? source * scale_ld + v
                           : PACKED ? (v / 4 * static_cast<long long>(scale_ld) + scale_row) * 4 + v % 4
                                    : swizzled_offset(scale_row, v, (columns + SCALE_BLOCK - 1) / SCALE_BLOCK);
      return scales[at];
    };
    u8* block = out + static_cast<long long>(number) * 1024 + lane * 4;
    // Neighbouring units of MXFP8 by one warp, whose pieces of a row are as long as what memory moves at a time.
    constexpr bool NEIGHBOURS = FMT == MXFP8;
    const int warps = gridDim.y * WARPS, step = NEIGHBOURS ? 1 : warps;
    int first_unit = (blockIdx.y * WARPS + warp) * (NEIGHBOURS ? AHEAD : 1);
    for (; first_unit < units; first_unit += warps * AHEAD) {
      Piece pieces[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int column = (first_unit + i * step) * 64 + t * 16;
        if (column < columns) pieces[i].load(row, column, FMT == BF16 ? 0 : scale_byte(column));
      }
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int unit = first_unit + i * step;
        if (unit >= units) break;
        u32 pairs[8];
        pieces[i].decode(pairs);
        u8* to = block + static_cast<long long>(unit) * token_blocks * 1024;
#pragma unroll
        for (int j = 0; j < 8; ++j) *reinterpret_cast<u32*>(to + j * 128) = pairs[j];
      }
    }
  }
}
