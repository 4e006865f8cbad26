// Gathers the rows of a grouped GEMM and decodes them to bf16, once, in the order in which wgmma reads them.
//
// Blocks of 8 tokens: [block][K / 8][8 tokens][8 numbers], with the columns of each 64 in the order of decoded_gemm.py.
// A group starts at block (group_offsets[g] + 7 * g) / 8. A warp takes 8 rows and 64 columns: lane = row * 4 + t has the
// columns 16 * t .. 16 * t + 15. Columns past K are zeros; NVFP4 numbers are 2^100 times their value.
//
// Macros: FMT (FormatCode), MAX_GROUPS, SCALE_BLOCK, PACKED (ScaleLayout of the scales, else swizzled).

#include "numbers.cuh"

extern "C" __global__ void __launch_bounds__(256)
    decode_tokens(const u8* rows, const u8* scales, const int* row_index, const int* group_offsets,
                  const int* group_scale_offsets, const int* expert_ids, const int* num_active, u8* out, int num_groups,
                  int num_experts, int capacity, int columns,
                  int units, int packed_ld, long long row_bytes) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  if (num_active) num_groups = min(num_groups, max(*num_active, 0));
  __shared__ int offsets[MAX_GROUPS + 1];
  for (int g = threadIdx.x; g <= num_groups; g += blockDim.x) offsets[g] = min(max(group_offsets[g], 0), capacity);
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, t = lane & 3;
  const int position = blockIdx.x * 8 + lane / 4;
  if (num_groups == 0 || position >= capacity || position >= offsets[num_groups]) return;
  // The last group that starts at or before the row, and so the one that is not empty.
  int group = 0;
  for (int high = num_groups; high - group > 1;) {
    const int middle = (group + high) / 2;
    if (offsets[middle] <= position) group = middle;
    else high = middle;
  }
  // Nothing of a group that is skipped is read.
  if (static_cast<u32>(expert_ids[group]) >= static_cast<u32>(num_experts)) return;
  const int start = offsets[group], local = position - start;
  const u8* row = rows + (row_index ? row_index[position] : position) * row_bytes;
  const long long first = FMT == BF16 ? 0 : group_scale_offsets[group];
  const long long scale_row = PACKED ? first + local : (start / 128 + first) * 128 + local;
  auto scale_byte = [&](int column) {
    const int v = column / SCALE_BLOCK;
    const long long at = PACKED ? (v / 4 * static_cast<long long>(packed_ld) + scale_row) * 4 + v % 4
                                : swizzled_offset(scale_row, v, (columns + SCALE_BLOCK - 1) / SCALE_BLOCK);
    return scales[at];
  };
  u8* block = out + static_cast<long long>((start + 7 * group) / 8 + local / 8) * units * 1024 + local % 8 * 16 + t * 4;
  for (int unit = blockIdx.y * 8 + warp; unit < units; unit += gridDim.y * 8) {
    const int column = unit * 64 + t * 16;
    u32 pairs[8] = {};
    if (column < columns) {
      if (FMT == BF16) {
        const uint4* from = reinterpret_cast<const uint4*>(row + column * 2);
        const uint4 low = from[0], high = from[1];
        pairs[0] = low.x, pairs[1] = low.y, pairs[2] = low.z, pairs[3] = low.w;
        pairs[4] = high.x, pairs[5] = high.y, pairs[6] = high.z, pairs[7] = high.w;
      } else if (FMT == NVFP4) {
        const uint2 quants = *reinterpret_cast<const uint2*>(row + column / 2);
        float scale, unused;
        e4m3_pair(scale_byte(column), scale, unused);
        // A number placed in bf16 bits is 2^-126 times its value, and 2^118 the most that its scale can carry.
        const u32 factor = pack_bf16(scale * 0x1p118f, scale * 0x1p118f);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const u32 byte = (i < 4 ? quants.x : quants.y) >> (8 * (i & 3));
          const u32 placed = (byte & 7) << 6 | (byte & 8) << 12 | (byte & 0x70) << 18 | (byte & 0x80) << 24;
          pairs[i] = multiply(multiply(placed, factor), 0x75807580);  // 2^108
        }
      } else {
        const uint4 quants = *reinterpret_cast<const uint4*>(row + column);
        const u32 factor = e8m0_pair(scale_byte(column));
        const u32 words[4] = {quants.x, quants.y, quants.z, quants.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float low, high;
          e4m3_pair(static_cast<u16>(words[i / 2] >> (16 * (i & 1))), low, high);
          pairs[i] = multiply(pack_bf16(low, high), factor);
        }
      }
    }
    u8* to = block + static_cast<long long>(unit) * 1024;
#pragma unroll
    for (int i = 0; i < 8; ++i) *reinterpret_cast<u32*>(to + i * 128) = pairs[i];
  }
}
