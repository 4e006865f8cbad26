// Rows of this rank's own tokens that `dispatch_send` stores to their places, for inclusion by the kernels of dispatch.
//
// Macros: K, OWN_TOKENS (tokens whose entries are numbered together, a multiple of 32).

#ifndef MOE_RUNTIME_OWN_ROWS
#define MOE_RUNTIME_OWN_ROWS

#include "numbers.cuh"

// How long a kernel waits for what spares it copies, before it does without: peers may be late.
constexpr long long OWN_ROWS_PATIENCE_NS = 20'000;

// Scratch memory of a step. `ExchangePlan.own_words` is its size.
struct OwnPlaces {
  int* numbers;  // [max_tokens, K]: of an entry among those of its block for the same expert of this rank
  int* placed;   // [max_tokens]: whether the rows of a token that stays here were stored
  int* first;    // [experts of this rank]: row of the first own entry
  int* before;   // [blocks of OWN_TOKENS, experts of all ranks]: own entries in the blocks before

  __device__ OwnPlaces(int* scratch, int max_tokens, int num_experts)
      : numbers(scratch),
        placed(numbers + static_cast<long long>(max_tokens) * K),
        first(placed + max_tokens),
        before(first + num_experts) {}
};

#endif
