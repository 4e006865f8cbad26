// The ids of which groups of rows are made, for inclusion by kernels that find their groups before the kernel that
// gathers the rows has ended. Group g has one row for each id `first + g`, but for routes whose weight is NaN where the
// weights are given; the groups follow one another.

#ifndef MOE_RUNTIME_ROUTED_IDS
#define MOE_RUNTIME_ROUTED_IDS

#include "numbers.cuh"
#include "own_expert.cuh"

struct RoutedIds {
  const void* ids;       // [count] int or long long; null if the offsets of the groups are there already
  const float* weights;  // [count], or null
  int count;
  int bytes;     // of an id: 4 or 8
  int first_id;  // of the first group

  __device__ __forceinline__ bool given() const { return ids != nullptr; }

  // The group of an id, or the largest u32 if it has none. L1 could have what was there in an earlier step.
  __device__ __forceinline__ u32 load(int i, int num_groups) const {
    if (i >= count) return ~0u;
    const long long id =
        bytes == 8 ? __ldcg(static_cast<const long long*>(ids) + i) : __ldcg(static_cast<const int*>(ids) + i);
    const float weight = weights == nullptr ? 0.0f : __ldcg(weights + i);
    const int group = own_expert(id, weight, first_id, num_groups, 0);
    return group < num_groups ? static_cast<u32>(group) : ~0u;
  }

  // The offsets of groups `first` to `first + GROUPS`, as far as there are groups. For a whole warp, in which `first`
  // differs.
  template <int GROUPS>
  __device__ __forceinline__ void find_offsets(int first, int num_groups, int (&offsets)[GROUPS + 1]) const {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i <= GROUPS; ++i) offsets[i] = 0;
    for (int begin = 0; begin < count; begin += 32) {
      const u32 id_of_lane = load(begin + lane, num_groups);
      const int here = count - begin < 32 ? count - begin : 32;
      for (int other = 0; other < here; ++other) {
        const u32 id = __shfl_sync(~0u, id_of_lane, other);
#pragma unroll
        for (int i = 0; i <= GROUPS; ++i) offsets[i] += id < static_cast<u32>(first + i);
      }
    }
  }
};

#endif
