// `num_slots` rows for each expert, filled from the front, as `padded.py` describes, for inclusion by dispatch_recv.cu.
// A last block writes the counts alone.

#include "recv_places.cuh"

struct RowLayout {
  static constexpr int EXTRA_TASKS = 1;
  static constexpr int PIECES_AT_ONCE = 14;  // a warp copies few rows: the fewer rounds, the better

  int *group_offsets, *group_scale_offsets;
  u8* scales;
  int *counts, *source_tokens;
  long long* layout_range;
  int* statistics;

  // Whether this block writes the counts.
  __device__ __forceinline__ bool writes_counts(u32 task, int split) const { return task == static_cast<u32>(split); }

  // For a whole block.
  __device__ __forceinline__ void write_counts(const Places& places, bool good, int num_local, int num_slots,
                                               int max_tokens) const {
    places.write_offsets(group_offsets, group_scale_offsets, good, num_local);
    // The kernel before may be one that adds to the same statistics, or the caller's that sets them.
    if (statistics != nullptr) asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int e = threadIdx.x; e < num_local; e += THREADS) {
      counts[e] = good ? places.totals[e] : 0;
      if (good && statistics != nullptr) statistics[e] += places.totals[e];
    }
    // Rows of an expert from slots before `s`.
    const auto rows_before = [&](int e, int s) {
      if (s >= num_slots) return places.totals[e];
      return places.before[e][s / 32] + places.entries(e, s / 32, (1u << s % 32) - 1);
    };
    for (int i = threadIdx.x; i < num_local * WORLD; i += THREADS) {
      const int e = i / WORLD, first = i % WORLD * max_tokens;
      const long long begin = rows_before(e, first), end = rows_before(e, first + max_tokens);
      layout_range[i] = good ? begin << 32 | (end - begin) : 0;
    }
  }

  // Turns the position of a row of expert `e` into its place, and finds its first scale, from which the next is
  // `num_slots` away.
  __device__ __forceinline__ long long place(const Places& places, int e, int& position, int num_slots) const {
    const int row = position - places.offset[e];
    position = e * num_slots + row;
    return static_cast<long long>(e) * SCALE_COLUMNS * num_slots + row;
  }

  __device__ __forceinline__ void store_source(int position, int slot, int max_tokens) const {
    source_tokens[position] = slot % max_tokens;
  }

  __device__ __forceinline__ void store_scale(long long, long long at, int word, u32 value, int num_slots) const {
    reinterpret_cast<u32*>(scales)[at + static_cast<long long>(word) * num_slots] = value;
  }
};
