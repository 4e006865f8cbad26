// Before `dispatch_send`: finds where the rows of this rank's own tokens go, so that they are stored there as they are
// sent, and not copied from their records afterwards.
//
// Rows are grouped by expert, then by source rank, then by token. A block counts the entries of OWN_TOKENS tokens for
// each expert, and numbers those for experts of this rank. The last block stores this rank's counts on the peers,
// awaits theirs, and adds up.
//
// All of this only spares copies. Where a peer is late, or runs kernels that send no counts, this kernel gives up after
// OWN_ROWS_PATIENCE_NS: own tokens then land in records like others, `dispatch_recv` copies them, and rows are the
// same. For that reason failures are not looked for here.
//
// Counts lie behind the slots of the half of the epoch, a row of them for each source. Like a slot they are written
// when the receiver no longer reads that half: it has entered this epoch, which this kernel signals as `dispatch_send`
// does, or has combined the epoch that used the half before.
//
// Macros: those of signalling.cuh and own_rows.cuh, IDS (type of the expert ids), EXPERTS (of this rank, at least 1),
// ALL_EXPERTS, RECORD_BYTES, READY, COMBINE_FLAG and COUNTED (words of SignalLayout).

#include "own_rows.cuh"
#include "signalling.cuh"

constexpr int WORDS = OWN_TOKENS / 32;
constexpr int SOURCE_WORDS = (ALL_EXPERTS + WORLD - 1) / WORLD;  // counts of a source, at most
constexpr int AT_ONCE = 8;                                       // loads in flight

static_assert(OWN_TOKENS % 32 == 0 && OWN_TOKENS <= 1024, "OWN_TOKENS: a thread of a block has a token");
static_assert(WORLD > 1, "WORLD: a rank alone has nobody to count with");
static_assert(4 * EXPERTS * WORDS + 4 * ALL_EXPERTS <= 44 * 1024, "EXPERTS: too many for static shared memory");

// Returns the ranks that have come, all of them or those that have when patience ends. For a whole warp.
template <class HasCome>
__device__ __forceinline__ u32 await_some(HasCome has_come) {
  const int lane = threadIdx.x & 31;
  const long long start = clock_ns();
  for (;;) {
    const u32 come = __ballot_sync(ALL, lane < WORLD && has_come());
    if (__popc(come) == WORLD || __any_sync(ALL, clock_ns() - start > OWN_ROWS_PATIENCE_NS)) return come;
  }
}

extern "C" __global__ void __launch_bounds__(OWN_TOKENS)
    place_own_rows(const IDS* topk_idx, int num_tokens, const int* starts, const u64* landing, const u64* signals,
                   const int* epoch_ptr, int* scratch, int* error, int* latch, int* counter, int* placing, int rank,
                   int first_expert, int num_local, int max_tokens, long long landing_half) {
  __shared__ u32 bits[EXPERTS][WORDS];
  __shared__ int counts[ALL_EXPERTS];
  __shared__ int totals[EXPERTS], lower[EXPERTS];
  __shared__ bool is_last;
  __shared__ u32 shared_mask;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, peer = min(lane, WORLD - 1);
  const Exchange x{signals, error, latch, rank, 0};
  const int* own = x.words(rank);
  int* const words_of_lane = x.words(peer);
  const OwnPlaces places(scratch, max_tokens, ALL_EXPERTS);
  for (int i = threadIdx.x; i < EXPERTS * WORDS; i += OWN_TOKENS) bits[i / WORDS][i % WORDS] = 0;
  for (int e = threadIdx.x; e < ALL_EXPERTS; e += OWN_TOKENS) counts[e] = 0;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  // `dispatch_send` reads what was there before this kernel, and awaits what this kernel writes by `placing`.
  asm volatile("griddepcontrol.launch_dependents;");
  const int epoch = load_relaxed(epoch_ptr) + 1, half = epoch & 1;
  if (blockIdx.x == 0 && threadIdx.x < WORLD) store_release(words_of_lane + READY + rank, epoch);
  if (epoch == 0) return;  // words that nobody has written seem to be of this epoch
  __syncthreads();

  const int token = blockIdx.x * OWN_TOKENS + threadIdx.x;
  int ids[K];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const long long id = token < num_tokens ? topk_idx[static_cast<long long>(token) * K + k] : -1;
    ids[k] = id >= 0 && id < ALL_EXPERTS ? static_cast<int>(id) : -1;
#pragma unroll
    for (int earlier = 0; earlier < k; ++earlier)
      if (ids[earlier] == ids[k]) ids[k] = -1;  // as `route` of dispatch_send.cu, which records it
    if (ids[k] >= 0) atomicAdd(&counts[ids[k]], 1);
    const int local = ids[k] - first_expert;
    if (ids[k] >= 0 && local >= 0 && local < num_local) atomicOr(&bits[local][warp], 1u << lane);
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int local = ids[k] - first_expert;
    if (ids[k] < 0 || local < 0 || local >= num_local) continue;
    int number = __popc(bits[local][warp] & ((1u << lane) - 1));
    for (int word = 0; word < warp; ++word) number += __popc(bits[local][word]);
    places.numbers[static_cast<long long>(token) * K + k] = number;
  }
  for (int e = threadIdx.x; e < ALL_EXPERTS; e += OWN_TOKENS)
    places.before[static_cast<long long>(blockIdx.x) * ALL_EXPERTS + e] = counts[e];
  __syncthreads();
  if (threadIdx.x == 0) is_last = last_to_arrive(counter);
  __syncthreads();
  if (!is_last) return;

  // Of all blocks.
  for (int e = threadIdx.x; e < ALL_EXPERTS; e += OWN_TOKENS) {
    int sum = 0;
    for (int start = 0; start < static_cast<int>(gridDim.x); start += AT_ONCE) {
      int of_blocks[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int block = start + i;
        of_blocks[i] = block < static_cast<int>(gridDim.x)
                           ? __ldcg(places.before + static_cast<long long>(block) * ALL_EXPERTS + e)
                           : 0;
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int block = start + i;
        if (block < static_cast<int>(gridDim.x)) places.before[static_cast<long long>(block) * ALL_EXPERTS + e] = sum;
        sum += of_blocks[i];
      }
    }
    counts[e] = sum;
  }
  if (warp == 0) {
    const u32 free = await_some([&] {
      return ahead(load_acquire(own + READY + peer), epoch) >= 0 ||
             combined_before(load_acquire(own + COMBINE_FLAG + half * WORLD + peer), epoch);
    });
    if (lane == 0) shared_mask = free;
  }
  __syncthreads();
  const u32 free = shared_mask;
  // Of source `source`, for the experts of rank `to`.
  auto counts_at = [&](int to, int source) {
    const u64 at = landing[to] + half * landing_half + static_cast<long long>(WORLD) * max_tokens * RECORD_BYTES;
    return reinterpret_cast<int*>(at) + source * SOURCE_WORDS;
  };
  for (int to = 0; to < WORLD; ++to) {
    if (!(free >> to & 1)) continue;
    const int begin = starts[to], end = starts[to + 1];
    for (int e = begin + static_cast<int>(threadIdx.x); e < end; e += OWN_TOKENS)
      store_relaxed(counts_at(to, rank) + e - begin, counts[e]);
  }
  __syncthreads();
  if (warp == 0) {
    const int counted = COUNTED + half * WORLD;
    if (lane < WORLD && (free >> lane & 1)) store_release(words_of_lane + counted + rank, epoch);
    __syncwarp();
    const u32 come = await_some([&] { return load_acquire(own + counted + peer) == epoch; });
    if (lane == 0) shared_mask = come;
  }
  __syncthreads();
  if (__popc(shared_mask) != WORLD) return;
  for (int e = threadIdx.x; e < EXPERTS; e += OWN_TOKENS) {
    int sum = 0, of_lower = 0;
#pragma unroll
    for (int source = 0; source < WORLD; ++source) {
      const int count = e < num_local ? load_relaxed(counts_at(rank, source) + e) : 0;
      if (source < rank) of_lower += count;
      sum += count;
    }
    totals[e] = sum, lower[e] = of_lower;
  }
  __syncthreads();
  if (warp == 0) {
    int row = 0;
    for (int start = 0; start < EXPERTS; start += 32) {
      const int e = start + lane, count = e < EXPERTS ? totals[e] : 0;
      int upto = count;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int more = __shfl_up_sync(ALL, upto, d);
        if (lane >= d) upto += more;
      }
      if (e < EXPERTS) places.first[e] = row + upto - count + lower[e];
      row += __shfl_sync(ALL, upto, 31);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) store_release(placing, 1);
}
