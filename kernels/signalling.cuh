// How kernels wait for peers and tell them of failures, for inclusion; `kernels/signalling.py` has it for Triton, and
// `comm/signals.py` the words. Every wait ends, by the flag, a failure or the clock; lane p of a warp waits for rank p.
//
// Macros: WORLD (at most 32), ABORT, ABORT_WORDS, TIMEOUT (ErrorCode); TURN_BIT and COUNT_BITS where asked for.

#include "bulk_store.cuh"
#include "clock.cuh"
#include "numbers.cuh"

constexpr u32 ALL = 0xFFFFFFFFu;

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

// What every kernel of an exchange is told.
struct Exchange {
  const u64* signals;  // signal region of each rank
  int* error;          // host-visible record
  int* latch;          // not zero after the first failure; the word behind it: all peers have been told of that
  int rank;
  long long timeout_ns;

  __device__ int* words(int peer) const { return reinterpret_cast<int*>(signals[peer]); }
  __device__ bool failed() const { return load_relaxed(latch) != 0; }
};

// Epochs are compared by difference, which holds across the wrap of int32.
__device__ __forceinline__ int ahead(int epoch, int of) {
  return static_cast<int>(static_cast<u32>(epoch) - static_cast<u32>(of));
}

// Records the first failure that this rank has, or that rank `origin` has told it of, on the host-visible record and on every
// peer; later ones change nothing.
__device__ __forceinline__ void record_failure_of(const Exchange& x, int code, int about, int phase, int epoch, int detail,
                                                  int detail2, int origin) {
  if (atomicCAS(x.latch, 0, code) != 0) return;
  const int record[6] = {about, phase, epoch, detail, origin, detail2};
  for (int i = 0; i < 6; ++i) store_relaxed(x.error + 1 + i, record[i]);
  store_release(x.error, code);
  for (int peer = 0; peer < WORLD; ++peer) {
    if (peer == x.rank) continue;
    int* words = x.words(peer) + ABORT + x.rank * ABORT_WORDS;
    const int told[6] = {phase, epoch, about, detail, detail2, origin == x.rank ? 0 : origin + 1};
    for (int i = 0; i < 6; ++i) store_relaxed(words + 1 + i, told[i]);
    store_release(words, code);
  }
  store_release(x.latch + 1, 1);
}

// Calls, since they are rare and would hold registers where they are made.
__device__ __noinline__ void record_failure(const Exchange x, int code, int about, int phase, int epoch, int detail,
                                            int detail2) {
  record_failure_of(x, code, about, phase, epoch, detail, detail2, x.rank);
}

// Until all peers have been told of this rank's failure, which another of its kernels may be about to do.
__device__ __forceinline__ void await_told(const Exchange& x) {
  while (load_acquire(x.latch + 1) == 0) {}
}

__device__ __noinline__ void adopt_abort(const Exchange x, int peer) {
  const int* words = x.words(x.rank) + ABORT + peer * ABORT_WORDS;
  const int code = load_acquire(words), told_by = words[6];
  record_failure_of(x, code, words[3], words[1], words[2], words[4], words[5], told_by == 0 ? peer : told_by - 1);
}

// Takes over the failure of a peer, if one has told of any, and tells it on: this rank raises its flags with nothing behind
// them then, maybe before the peer has told all others. For a whole warp.
__device__ __forceinline__ void adopt_aborts(const Exchange& x) {
  const int lane = threadIdx.x & 31;
  const int* words = x.words(x.rank) + ABORT + lane * ABORT_WORDS;
  const u32 told = __ballot_sync(ALL, lane < WORLD && load_relaxed(words) != 0);
  if (told && lane == __ffs(told) - 1) adopt_abort(x, lane);
  __syncwarp();
}

// What a lane has seen of its peer and of failures, with all loads under way at once.
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

// Whether a lane has waited for too long since `start`; then the lowest such lane records its `peer`. For a whole warp.
__device__ __forceinline__ bool too_late(const Exchange& x, bool waiting, int peer, long long start, int phase, int epoch) {
  const u32 late = __ballot_sync(ALL, waiting && clock_ns() - start > x.timeout_ns);
  if (late == 0) return false;
  const long long milliseconds = min(x.timeout_ns / 1000000, 2147483647ll);
  if ((threadIdx.x & 31) == __ffs(late) - 1)
    record_failure(x, TIMEOUT, peer, phase, epoch, static_cast<int>(milliseconds), 0);
  return true;
}

// Waits, in each lane with `wants`, until flag `a` has reached `of_a` or flag `b` has reached `of_b`, and answers whether
// this rank has failed. `exact` is for a flag `a` that not all raise: of an epoch long ago it may seem to be ahead. A peer
// that is late is recorded, the lowest first; an abort is adopted; after a failure there is no waiting. For a whole warp.
__device__ __forceinline__ bool await(const Exchange& x, const int* own, bool wants, const int* a, int of_a, const int* b,
                                      int of_b, int phase, int epoch, bool exact = false) {
  const int lane = threadIdx.x & 31;
  auto behind = [&] {
    const int seen = load_acquire(a);
    return (exact ? seen != of_a : ahead(seen, of_a) < 0) && (a == b || ahead(load_acquire(b), of_b) < 0);
  };
  bool waiting = wants && behind();
  // A peer that fails tells of it and then raises its flag with nothing behind it: failures are looked for after the
  // flags.
  bool trouble = Glance(x, own).trouble();
  if (!trouble && __any_sync(ALL, waiting)) {
    const long long start = clock_ns();
    for (int spin = 1;; ++spin) {
      if (waiting) waiting = behind();
      const bool done = !__any_sync(ALL, waiting);
      // Flags are looked at often, all else now and then and at the end.
      if (!done && spin % 16 != 0) continue;
      trouble = Glance(x, own).trouble();
      if (trouble || done) break;
      if (too_late(x, waiting, lane, start, phase, epoch)) {
        trouble = true;
        break;
      }
    }
  }
  __syncwarp();
  if (trouble) adopt_aborts(x);
  return trouble;
}

// Whether two dispatches have begun since that of `epoch`, so that its half is another's. The kernel before may be the
// second of them and not have said so yet: where it could be, it is waited for.
__device__ __forceinline__ bool is_stale(const int* epoch_ptr, int epoch) {
  int last = load_relaxed(epoch_ptr);
  if (ahead(last, epoch) == 1) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    last = load_relaxed(epoch_ptr);
  }
  return ahead(last, epoch) >= 2;
}

#ifdef TURN_BIT
// What is stored with a number of tokens: for which exchange they are, and whose turn of its half the epoch is.
__device__ __forceinline__ int tag_of(int count_tag, int epoch) { return count_tag | ((epoch >> 1 ^ epoch) & 1) << TURN_BIT; }

__device__ __forceinline__ int exchange_of(int word) { return (word & (1 << TURN_BIT) - 1) >> COUNT_BITS; }

__device__ __forceinline__ bool same_turn(int word, int tag) { return ((word ^ tag) >> TURN_BIT & 1) == 0; }

// The sign of the word: stamps of these tokens say that they have landed.
__device__ __forceinline__ bool is_stamped(int word) { return word < 0; }

__device__ __forceinline__ int with_sign(int word) { return static_cast<int>(static_cast<u32>(word) | 0x80000000u); }

__device__ __forceinline__ int without_sign(int word) { return word & 0x7FFFFFFF; }
#endif

// Before other threads, or ranks, are told: what this thread has stored, and has seen, comes first.
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// True in the block that comes last, which sees all that the others stored before; resets the counter. One thread.
__device__ __forceinline__ bool last_to_arrive(int* counter) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  const bool last = before == static_cast<int>(gridDim.x) - 1;
  if (last) *counter = 0;
  return last;
}

// Rank that owns an expert; lane p has the first expert after rank p's. For a whole warp.
__device__ __forceinline__ int owner_of(int expert, int end_of_lane) {
  int owner = 0;
#pragma unroll
  for (int rank = 0; rank < WORLD; ++rank) owner += expert >= __shfl_sync(ALL, end_of_lane, rank);
  return owner;
}

__device__ __forceinline__ void team_barrier(int team, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(threads) : "memory");
}
