// Waiting for peers and signalling failures, for inclusion by kernels. `comm/signals.py` has the layout of the words.
// Every wait ends, by the flag, by a failure or by the clock. Lane p of a warp waits for rank p.
//
// Macros: WORLD (at most 32), ABORT, ABORT_WORDS, TIMEOUT (ErrorCode); TURN_BIT and COUNT_BITS for token counts.

#include "bulk_store.cuh"
#include "clock.cuh"
#include "numbers.cuh"

constexpr u32 ALL = 0xFFFFFFFFu;
constexpr int NONE = 0xFFFF;  // in place of an expert id in a record
static_assert(WORLD >= 1 && WORLD <= 32, "WORLD: a lane of a warp stands for a rank, so there are 1 to 32");
static_assert(ABORT_WORDS >= 7, "ABORT_WORDS: an abort message is a code and six words");

__device__ __forceinline__ int load_acquire(const int* at) {
  int value;
  asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ int load_relaxed(const int* at) {
  int value;
  asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ void store_relaxed(int* at, int value) {
  asm volatile("st.relaxed.sys.global.s32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ void store_release(int* at, int value) {
  asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// Common arguments of the exchange kernels.
struct Exchange {
  const u64* signals;  // signal region of each rank
  int* error;          // error record in host-visible memory
  int* latch;  // not zero after the first failure; the next word: the abort messages to all peers have been sent
  int rank;
  long long timeout_ns;

  __device__ int* words(int peer) const { return reinterpret_cast<int*>(signals[peer]); }
  __device__ bool failed() const { return load_relaxed(latch) != 0; }
};

// Epochs are compared by difference, which holds across the wrap of int32.
__device__ __forceinline__ int ahead(int epoch, int of) {
  return static_cast<int>(static_cast<u32>(epoch) - static_cast<u32>(of));
}

// Whether a combine flag says that the last epoch in the half of `epoch` was combined. Not all epochs are: a flag of
// long ago may seem to be ahead. One that nobody has written is 0, one ahead of what there was before epoch 1.
__device__ __forceinline__ bool combined_before(int flag, int epoch) {
  const int by = ahead(flag, epoch);
  return by == -2 || by == -1;
}

// Records the first failure of this rank, its own or one learned from rank `origin`, in the error record, and sends an
// abort message to every peer. Later failures change nothing.
__device__ __forceinline__ void record_failure_of(const Exchange& x, int code, int about, int phase, int epoch,
                                                  int detail, int detail2, int origin) {
  if (atomicCAS(x.latch, 0, code) != 0) return;
  const int record[6] = {about, phase, epoch, detail, origin, detail2};
  for (int i = 0; i < 6; ++i) store_relaxed(x.error + 1 + i, record[i]);
  store_release(x.error, code);
  for (int peer = 0; peer < WORLD; ++peer) {
    if (peer == x.rank) continue;
    int* words = x.words(peer) + ABORT + x.rank * ABORT_WORDS;
    const int message[6] = {phase, epoch, about, detail, detail2, origin == x.rank ? 0 : origin + 1};
    for (int i = 0; i < 6; ++i) store_relaxed(words + 1 + i, message[i]);
    store_release(words, code);
  }
  store_release(x.latch + 1, 1);
}

// Not inlined: failures are rare, and inlined code would hold registers.
__device__ __noinline__ void record_failure(const Exchange x, int code, int about, int phase, int epoch, int detail,
                                            int detail2) {
  record_failure_of(x, code, about, phase, epoch, detail, detail2, x.rank);
}

// An expert id as a failure records it: the nearest int. One that is cut off could look like an id of the layer.
__device__ __forceinline__ int recorded_id(long long id) {
  return static_cast<int>(id > 0x7FFFFFFFll ? 0x7FFFFFFFll : id < -0x80000000ll ? -0x80000000ll : id);
}

// Waits until the abort messages of this rank's failure have been sent: another of its kernels may still be sending
// them.
__device__ __forceinline__ void await_abort_sent(const Exchange& x) {
  while (load_acquire(x.latch + 1) == 0) {
  }
}

__device__ __noinline__ void adopt_abort(const Exchange x, int peer) {
  const int* words = x.words(x.rank) + ABORT + peer * ABORT_WORDS;
  const int code = load_acquire(words), origin = words[6];
  record_failure_of(x, code, words[3], words[1], words[2], words[4], words[5], origin == 0 ? peer : origin - 1);
}

// Adopts the failure of a peer, if there is an abort message, and forwards it: this rank is about to raise flags
// without data, maybe before that peer has sent its message to all others. For a whole warp.
__device__ __forceinline__ void adopt_aborts(const Exchange& x) {
  const int lane = threadIdx.x & 31;
  const int* words = x.words(x.rank) + ABORT + lane * ABORT_WORDS;
  const u32 aborted = __ballot_sync(ALL, lane < WORLD && load_relaxed(words) != 0);
  if (aborted && lane == __ffs(aborted) - 1) adopt_abort(x, lane);
  __syncwarp();
}

// What a lane sees of failures, its peer's and this rank's, with both loads in flight at once.
struct Glance {
  int aborted, latched;

  __device__ __forceinline__ Glance(const Exchange& x, const int* own) {
    const int lane = threadIdx.x & 31;
    aborted = lane < WORLD ? load_relaxed(own + ABORT + lane * ABORT_WORDS) : 0;
    latched = load_relaxed(x.latch);
  }

  // For a whole warp.
  __device__ __forceinline__ bool trouble() const { return __any_sync(ALL, aborted != 0 || latched != 0); }
};

// Whether a lane has waited longer than the timeout since `start`; the lowest such lane records its `peer`. For a whole
// warp.
__device__ __forceinline__ bool too_late(const Exchange& x, bool waiting, int peer, long long start, int phase,
                                         int epoch) {
  const u32 late = __ballot_sync(ALL, waiting && clock_ns() - start > x.timeout_ns);
  if (late == 0) return false;
  const long long milliseconds = min(x.timeout_ns / 1000000, 2147483647ll);
  if ((threadIdx.x & 31) == __ffs(late) - 1)
    record_failure(x, TIMEOUT, peer, phase, epoch, static_cast<int>(milliseconds), 0);
  return true;
}

// Waits while `is_waiting` holds in a lane; it says so of the rank of that number and is called by all lanes together.
// Returns whether this rank has failed. A late peer is recorded, the lowest first; an abort is adopted; after a failure
// there is no waiting. For a whole warp.
template <class IsWaiting>
__device__ __forceinline__ bool await_while(const Exchange& x, const int* own, IsWaiting is_waiting, int phase,
                                            int epoch) {
  bool waiting = is_waiting();
  // A peer that fails sends its abort message and then raises its flag without data. So failures are looked for after
  // the flags.
  bool trouble = Glance(x, own).trouble();
  if (!trouble && __any_sync(ALL, waiting)) {
    const long long start = clock_ns();
    for (int spin = 1;; ++spin) {
      waiting = is_waiting();
      const bool done = !__any_sync(ALL, waiting);
      // Flags are polled often, failures and the clock every 16th time and at the end.
      if (!done && spin % 16 != 0) continue;
      trouble = Glance(x, own).trouble();
      if (trouble || done) break;
      if (too_late(x, waiting, threadIdx.x & 31, start, phase, epoch)) {
        trouble = true;
        break;
      }
    }
  }
  __syncwarp();
  if (trouble) adopt_aborts(x);
  return trouble;
}

// Waits, in each lane with `wants`, until `flag`, which all epochs raise, has reached `of`, as `await_while` does.
__device__ __forceinline__ bool await(const Exchange& x, const int* own, bool wants, const int* flag, int of, int phase,
                                      int epoch) {
  auto behind = [&] { return wants = wants && ahead(load_acquire(flag), of) < 0; };
  return await_while(x, own, behind, phase, epoch);
}

// Waits, in each lane with `wants`, until its rank no longer reads the half of `epoch`: it has entered this epoch, or
// has combined the one that used the half before.
__device__ __forceinline__ bool await_free(const Exchange& x, const int* own, bool wants, const int* ready,
                                           const int* combined, int phase, int epoch) {
  auto behind = [&] {
    if (!wants) return false;
    wants = ahead(load_acquire(ready), epoch) < 0 && !combined_before(load_acquire(combined), epoch);
    return wants;
  };
  return await_while(x, own, behind, phase, epoch);
}

// Whether two dispatches have begun since that of `epoch`, so that its half belongs to a later one. The kernel before
// may be the second of them and not have stored its epoch yet: where that is possible, its end is awaited.
__device__ __forceinline__ bool is_stale(const int* epoch_ptr, int epoch) {
  int last = load_relaxed(epoch_ptr);
  if (ahead(last, epoch) == 1) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    last = load_relaxed(epoch_ptr);
  }
  return ahead(last, epoch) >= 2;
}

#ifdef TURN_BIT
static_assert(COUNT_BITS > 0 && COUNT_BITS < TURN_BIT && TURN_BIT < 31,
              "TURN_BIT: a count's word has the count, the exchange, the turn and a sign, from the lowest bit on");

// What is stored with a token count: the number of the exchange, and the turn of the epoch in its half.
__device__ __forceinline__ int tag_of(int count_tag, int epoch) {
  return count_tag | ((epoch >> 1 ^ epoch) & 1) << TURN_BIT;
}

__device__ __forceinline__ int exchange_of(int word) { return (word & (1 << TURN_BIT) - 1) >> COUNT_BITS; }

__device__ __forceinline__ bool same_turn(int word, int tag) { return ((word ^ tag) >> TURN_BIT & 1) == 0; }

// The sign of the word: a token flag of this source means that the record has landed.
__device__ __forceinline__ bool has_token_flags(int word) { return word < 0; }

__device__ __forceinline__ int with_sign(int word) { return static_cast<int>(static_cast<u32>(word) | 0x80000000u); }

__device__ __forceinline__ int without_sign(int word) { return word & 0x7FFFFFFF; }
#endif

// What this thread has stored, and has seen, is visible before what it stores next.
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Returns true in the last block to call it, which sees all that the others stored before, and resets the counter. For
// one thread. What this block then releases at system scope comes after all that for peers, too: causality is
// transitive, also over scopes. So no block needs a fence at system scope before.
__device__ __forceinline__ bool last_to_arrive(int* counter) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  const bool last = before == static_cast<int>(gridDim.x) - 1;
  if (last) *counter = 0;
  return last;
}

// Rank that owns an expert; lane p holds the end of rank p's experts. For a whole warp.
__device__ __forceinline__ int owner_of(int expert, int end_of_lane) {
  int owner = 0;
#pragma unroll
  for (int rank = 0; rank < WORLD; ++rank) owner += expert >= __shfl_sync(ALL, end_of_lane, rank);
  return owner;
}

__device__ __forceinline__ void team_barrier(int team, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(threads) : "memory");
}
