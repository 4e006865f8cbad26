// Copies the experts of a step's tokens into a ring of steps. Which place of the ring comes next is counted here, on
// the device, so that each replay of a graph takes a place of its own.
//
// Ids that no expert has become -1. Places beyond a step's tokens stay as they were.
//
// Macros: IDS (type of the step's ids), RING_IDS (type of the ring's).

constexpr int THREADS = 256, AT_ONCE = 4;
// `words`: steps so far, blocks of this kernel that are done, then the number of tokens at each place.
constexpr int STEPS = 0, DONE = 1, TOKENS = 2;

extern "C" __global__ void __launch_bounds__(THREADS)
    record_routes(const IDS* topk_idx, const float* topk_weights, RING_IDS* ring, float* weights_ring, long long* words,
                  int num_tokens, int top_k, int num_experts, int steps, long long place_ids, int settled) {
  // What the step's kernels read may still be on its way, unless it is `settled`.
  if (!settled) asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  const int num_ids = num_tokens * top_k, first = blockIdx.x * THREADS * AT_ONCE + threadIdx.x;
  // All loads first, so that they are in flight at once: what this costs a step of one token is their latency.
  const long long step = __ldcg(words + STEPS);
  long long ids[AT_ONCE];
  float weights[AT_ONCE];
#pragma unroll
  for (int n = 0; n < AT_ONCE; ++n) {
    const int i = first + n * THREADS;
    // L1 could have what was there in an earlier step.
    ids[n] = i < num_ids ? __ldcg(topk_idx + i) : -1;
    weights[n] = i < num_ids && weights_ring != nullptr ? __ldcg(topk_weights + i) : 0.0f;
  }
  const long long place = step % steps;
  RING_IDS* const to = ring + place * place_ids;
#pragma unroll
  for (int n = 0; n < AT_ONCE; ++n) {
    const int i = first + n * THREADS;
    if (i >= num_ids) continue;
    to[i] = static_cast<RING_IDS>(ids[n] >= 0 && ids[n] < num_experts ? ids[n] : -1);
    if (weights_ring != nullptr) weights_ring[place * place_ids + i] = weights[n];
  }
  // The last block counts the step: all have read by then which one it is.
  __syncthreads();
  if (threadIdx.x == 0) {
    int before = 0;
    if (gridDim.x > 1)
      asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;"
                   : "=r"(before)
                   : "l"(reinterpret_cast<int*>(words + DONE))
                   : "memory");
    if (before == static_cast<int>(gridDim.x) - 1) {
      words[DONE] = 0;
      words[TOKENS + place] = num_tokens;
      words[STEPS] = step + 1;
    }
  }
  if (settled) asm volatile("griddepcontrol.wait;" ::: "memory");
}
