// Which tokens go where, for DeepEP's `get_dispatch_layout`: counts by rank and by expert, and the ranks of each token.
//
// A block counts its tokens in shared memory. A single block stores the counts, several add them to zeros.
//
// Reads 8 bytes for each id and writes WORLD bytes for each token: a launch and little else.
//
// Macros: WORLD.

#include "numbers.cuh"

constexpr int THREADS = 1024;
constexpr int AT_ONCE = 8;  // ids of a token that are loaded at a time

static_assert(WORLD >= 1 && WORLD <= 32, "WORLD: a bit for each rank");

// `counts`, `[W + E]`: tokens for each rank and for each expert; with several blocks, zeros before. `in_rank`, `[T,
// W]`. Of an id its lower 32 bits count, as in what travels with a token. Dynamic shared memory: W + E words.
extern "C" __global__ void __launch_bounds__(THREADS)
    dispatch_layout(const long long* topk_idx, long long id_row, long long id_column, int* counts, u8* in_rank,
                    int num_tokens, int top_k, int num_experts, int num_local) {
  extern __shared__ __align__(16) u8 memory[];
  int *const sums = reinterpret_cast<int*>(memory), *const of_experts = sums + WORLD;
  asm volatile("griddepcontrol.launch_dependents;");
  for (int i = threadIdx.x; i < WORLD + num_experts; i += THREADS) sums[i] = 0;
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int stride = gridDim.x * THREADS;
  // All threads of a warp go round as often.
  for (int start = blockIdx.x * THREADS; start < num_tokens; start += stride) {
    const int token = start + threadIdx.x;
    u32 ranks = 0;
    for (int first = 0; first < top_k; first += AT_ONCE) {
      long long ids[AT_ONCE];
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k)
        ids[k] = token < num_tokens && first + k < top_k ? topk_idx[token * id_row + (first + k) * id_column] : -1;
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) {
        const int id = static_cast<int>(ids[k]);
        if (id < 0 || id >= num_experts) continue;
        atomicAdd(&of_experts[id], 1);
        ranks |= 1u << id / num_local;
      }
    }
#pragma unroll
    for (int rank = 0; rank < WORLD; ++rank) {
      const bool goes = ranks >> rank & 1;
      if (token < num_tokens) in_rank[static_cast<long long>(token) * WORLD + rank] = goes;
      const u32 all = __ballot_sync(0xffffffffu, goes);
      if ((threadIdx.x & 31) == 0 && all != 0) atomicAdd(&sums[rank], __popc(all));
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < WORLD + num_experts; i += THREADS) {
    if (gridDim.x == 1) counts[i] = sums[i];
    else if (sums[i] != 0) atomicAdd(&counts[i], sums[i]);
  }
}
