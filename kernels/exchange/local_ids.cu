// Expert ids of one rank's own numbering, for ranks that hold the same tokens and compute their own experts each.
//
// Macros: IDS (type of the ids).

extern "C" __global__ void __launch_bounds__(256) local_ids(const IDS* topk_idx, const float* topk_weights, int* local,
                                                            int num_ids, int num_experts, int first, int num_local) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= num_ids) return;
  const long long id = topk_idx[i];
  const float weight = topk_weights[i];
  int found = -1;
  if (weight == weight && id != -1) {
    const bool known = id >= 0 && id < num_experts, own = id >= first && id < first + num_local;
    if (!known) found = num_local;  // No expert: the dispatch finds and records it.
    if (own) found = static_cast<int>(id) - first;
  }
  local[i] = found;
}
