// A router's choice in the numbering of one rank's experts, for inclusion by kernels that read the router's ids.

#ifndef MOE_RUNTIME_OWN_EXPERT
#define MOE_RUNTIME_OWN_EXPERT

// Of the `num_own` experts that have the ids from `first` on: the number of the one with this id, -1 for the id -1,
// another expert's and a route whose weight is NaN, and `num_own`, which no expert has, for an id that none of the
// router's `num_all` experts has.
__device__ __forceinline__ int own_expert(long long id, float weight, int first, int num_own, int num_all) {
  if (weight != weight || id == -1) return -1;
  if (id >= first && id < first + num_own) return static_cast<int>(id) - first;
  return id >= 0 && id < num_all ? -1 : num_own;
}

#endif
