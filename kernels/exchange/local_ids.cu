// Expert ids of one rank's own numbering, for ranks that hold the same tokens and compute their own experts each.
//
// Macros: IDS (type of the ids).

#include "own_expert.cuh"

extern "C" __global__ void __launch_bounds__(256) local_ids(const IDS* topk_idx, const float* topk_weights, int* local,
                                                            int num_ids, int num_experts, int first, int num_local) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= num_ids) return;
  const long long id = topk_idx[i];
  // The dispatch finds and records ids that no expert has. With all experts here it names the router's.
  const int own = own_expert(id, topk_weights[i], first, num_local, num_experts);
  const bool is_named = own == num_experts && id == static_cast<int>(id);
  local[i] = is_named ? static_cast<int>(id) : own;
}
