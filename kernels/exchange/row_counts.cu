// How many tokens of DeepEP's normal mode each rank sends to each, before the tokens themselves: what rows a rank
// allocates, and where each row goes, follows from these counts alone.
//
// A block for each receiving rank counts the tokens for it, numbers them, and stores the counts on the peers. The last
// block raises a flag on each peer, awaits those of all, and writes their sums on this GPU and, where the host waits
// for them, in its memory, with a ticket behind them. `dispatch_send_rows` needs the numbers of this rank's tokens
// alone, and may begin when all blocks have written them.
//
// A rank's table has a row of TABLE_WORDS words for each source in each of two halves, used in turn: the flag, which is
// the number of the exchange of counts, its tokens, its tokens for each rank, and its tokens for each expert of the
// rank whose table it is. A half is written again when its rank has raised the flag of the exchange after, and so has
// read it.
//
// Macros: those of signalling.cuh, WARPS, TABLE_WORDS, MOST_LOCAL (experts of a rank at most), FROM_IDS (ids are given,
// not what `get_dispatch_layout` makes of them), DISPATCH_SEND and DISPATCH_RECV (Phase), CAPACITY (ErrorCode).

#include "signalling.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int FLAG = 0, TOKENS = 1, COUNTS = 2, EXPERTS = COUNTS + WORLD;
constexpr int HOST_TICKET = 0, HOST_MOST = 1, HOST_PREFIX = 2, HOST_EXPERTS = HOST_PREFIX + WORLD * WORLD;
constexpr int AT_ONCE = 8;       // ids of a token that are loaded at a time
constexpr int MOST_GROUPS = 32;  // of 32 tokens, that a warp looks at before the block adds up

static_assert(WARPS >= 1 && WARPS <= 32, "WARPS: a lane has the count of a warp");
static_assert(TABLE_WORDS >= EXPERTS + MOST_LOCAL, "TABLE_WORDS: too few for the counts of a source");

// `in_rank` or `topk_idx` and its strides are of this rank's tokens. Written: `index`, `[T, W]`, the number of a token
// among those for a rank, or -1; `entries`, `[T, W]` or null, that rank, or -1; `prefix`, `[W, W]`, tokens of ranks 0
// to i for rank j; `experts`, of all ranks for each expert of this one; `offsets`, 0 and the rows that come here.
// `state` has the number of the last exchange and a counter of blocks. `capacity` is of rows, or 0.
extern "C" __global__ void __launch_bounds__(32 * WARPS) dispatch_counts(
#if FROM_IDS
    const long long* topk_idx, long long id_row, long long id_column, int top_k,
#else
    const u8* in_rank, const int* per_expert,
#endif
    int num_tokens, int num_local, int* index, int* entries, int* prefix, int* experts, int* offsets, const u64* tables,
    int* state, const u64* signals, const int* epoch_ptr, int* error, int* latch, int* host, int rank, int capacity,
    int ticket, long long timeout_ns) {
  __shared__ int of_warps[WARPS];
  __shared__ int of_experts[FROM_IDS ? MOST_LOCAL : 1];
  __shared__ bool is_last;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, to = blockIdx.x;
  const Exchange x{signals, error, latch, rank, timeout_ns};
  const int* own = x.words(rank);
  const int first_expert = to * num_local;
  if (FROM_IDS)
    for (int i = threadIdx.x; i < num_local; i += THREADS) of_experts[i] = 0;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int number = load_relaxed(state) + 1, half = number & 1;
  auto row_of = [&](int peer, int source) {
    return reinterpret_cast<int*>(tables[peer]) + (half * WORLD + source) * TABLE_WORDS;
  };
  __syncthreads();

  auto goes = [&](int token) {
#if FROM_IDS
    bool here = false;
    for (int first = 0; first < top_k; first += AT_ONCE) {
      long long ids[AT_ONCE];
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k)
        ids[k] = first + k < top_k ? topk_idx[token * id_row + (first + k) * id_column] : -1;
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) {
        const int id = static_cast<int>(ids[k]), expert = id - first_expert;
        if (id < 0 || expert < 0 || expert >= num_local) continue;
        atomicAdd(&of_experts[expert], 1);
        here = true;
      }
    }
    return here;
#else
    return in_rank[static_cast<long long>(token) * WORLD + to] != 0;
#endif
  };
  int total = 0;
  for (int start = 0; start < num_tokens; start += THREADS * MOST_GROUPS) {
    const int groups = min(MOST_GROUPS, ceil_div(num_tokens - start, THREADS));
    const int first = start + warp * groups * 32 + lane;
    u32 mine = 0;
    // All loads first, so that several are in flight.
#pragma unroll 4
    for (int g = 0; g < groups; ++g)
      if (first + g * 32 < num_tokens) mine |= static_cast<u32>(goes(first + g * 32)) << g;
    int count = 0;
    for (int g = 0; g < groups; ++g) count += __popc(__ballot_sync(ALL, mine >> g & 1));
    if (lane == 0) of_warps[warp] = count;
    __syncthreads();
    const int of_lane = lane < WARPS ? of_warps[lane] : 0;
    int next = total + __reduce_add_sync(ALL, lane < warp ? of_lane : 0);
    total += __reduce_add_sync(ALL, of_lane);
    for (int g = 0; g < groups; ++g) {
      const int token = first + g * 32;
      const bool here = mine >> g & 1;
      const u32 others = __ballot_sync(ALL, here);
      if (token < num_tokens) {
        const long long at = static_cast<long long>(token) * WORLD + to;
        index[at] = here ? next + __popc(others & ((1u << lane) - 1)) : -1;
        if (entries != nullptr) entries[at] = here ? to : -1;
      }
      next += __popc(others);
    }
    __syncthreads();
  }

  if (threadIdx.x < WORLD) {
    int* const row = row_of(threadIdx.x, rank);
    store_relaxed(row + COUNTS + to, total);
    if (to == 0) store_relaxed(row + TOKENS, num_tokens);
  }
  int* const experts_there = row_of(to, rank) + EXPERTS;
  for (int i = threadIdx.x; i < num_local; i += THREADS) {
#if FROM_IDS
    store_relaxed(experts_there + i, of_experts[i]);
#else
    store_relaxed(experts_there + i, per_expert[first_expert + i]);
#endif
  }
  // `dispatch_send_rows` may read the numbers from now on.
  __threadfence();
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;");
  if (threadIdx.x == 0) is_last = last_to_arrive(state + 1);
  __syncthreads();
  if (!is_last) return;

  bool failed = false;
  if (warp == 0) {
    const int peer = min(lane, WORLD - 1), epoch = load_relaxed(epoch_ptr) + 1;
    if (lane < WORLD) store_release(row_of(peer, rank) + FLAG, number);
    __syncwarp();
    const int* flag = row_of(rank, peer) + FLAG;
    failed = await(x, own, lane < WORLD, flag, number, DISPATCH_SEND, epoch);
    const int most = __reduce_max_sync(ALL, lane < WORLD ? load_relaxed(row_of(rank, peer) + TOKENS) : 0);
    const int rows = __reduce_add_sync(ALL, lane < WORLD ? load_relaxed(row_of(rank, peer) + COUNTS + rank) : 0);
    if (lane == 0) {
      if (!failed && capacity > 0 && rows > capacity)
        record_failure(x, CAPACITY, rank, DISPATCH_RECV, epoch, rows, capacity);
      offsets[0] = 0, offsets[1] = failed ? 0 : capacity > 0 ? min(rows, capacity) : rows;
      if (host != nullptr) store_relaxed(host + HOST_MOST, most);
    }
  }
  failed = __syncthreads_or(failed) != 0;
  for (int i = threadIdx.x; i < WORLD * WORLD; i += THREADS) {
    int sum = 0;
    for (int source = 0; source <= i / WORLD; ++source) sum += load_relaxed(row_of(rank, source) + COUNTS + i % WORLD);
    if (failed) sum = 0;
    prefix[i] = sum;
    if (host != nullptr) store_relaxed(host + HOST_PREFIX + i, sum);
  }
  for (int i = threadIdx.x; i < num_local; i += THREADS) {
    int sum = 0;
    for (int source = 0; source < WORLD; ++source) sum += load_relaxed(row_of(rank, source) + EXPERTS + i);
    if (failed) sum = 0;
    experts[i] = sum;
    if (host != nullptr) store_relaxed(host + HOST_EXPERTS + i, sum);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    *state = number;
    if (host != nullptr) store_release(host + HOST_TICKET, ticket);
  }
}
