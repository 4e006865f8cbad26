// Rows that follow one another, expert after expert, for inclusion by dispatch_recv.cu.

#include "recv_places.cuh"

struct RowLayout {
  static constexpr int EXTRA_TASKS = 0;
  static constexpr int PIECES_AT_ONCE = 8;

  int *group_offsets, *group_scale_offsets, *row_index;
  u8* scales;
  int first_row, epoch;

  // Whether this block writes the counts.
  __device__ __forceinline__ bool writes_counts(u32, int) const { return blockIdx.x == FIRST_BLOCK; }

  // For a whole block.
  __device__ __forceinline__ void write_counts(const Places& places, bool good, int num_local, int, int) const {
    places.write_offsets(group_offsets, group_scale_offsets, good, num_local);
  }

  // Turns the position of a row of expert `e` into its place, and finds the first byte of its scales: in the 128x4
  // swizzle of the scales of its group.
  __device__ __forceinline__ long long place(const Places& places, int e, int& position, int) const {
    const int row = position - places.offset[e];
    return static_cast<long long>(places.block[e] + row / 128) * SCALE_WORDS * 512 + row % 32 * 16 + row % 128 / 32 * 4;
  }

  __device__ __forceinline__ void store_source(int position, int slot, int) const {
    row_index[position] = first_row * (epoch & 1) + slot;
  }

  __device__ __forceinline__ void store_scale(long long row, long long at, int word, u32 value, int) const {
    if (FMT == FP8_BLOCK) reinterpret_cast<u32*>(scales)[row * SCALE_COLUMNS + word] = value;
    else *reinterpret_cast<u32*>(scales + at + word * 512) = value;
  }
};
