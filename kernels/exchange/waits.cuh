// How long this rank waits for each of its peers, counted by a block of its own of the kernels that wait; for inclusion
// after signalling.cuh. `waits.py` says what the words are, and counts the same in torch.
//
// All times are of this GPU's clock. A wait begins when the flag of this rank itself is there: until then its own
// kernels send.

constexpr u32 ANY_AHEAD = 0x7FFFFFFF;  // most that a flag can be ahead of an epoch
constexpr int STEPS = 0, STEP_NS = 1, BEGAN = 2, HEAD = 4;
enum { DISPATCH_NS, DISPATCH_MAX, DISPATCH_WAITS, LATE_NS, COMBINE_NS, COMBINE_MAX, COMBINE_WAITS, FIELDS };

// What a lane has seen of its peer, and when this rank began to look.
struct Watch {
  long long began, entered = 0, sent = 0;
  bool complete = true;

  // Looks until each lane's `sent_flag` has reached `epoch`, or something has failed, which other blocks record. Flags
  // are ahead of it by `most` at most: where not all epochs raise them, one of long ago may seem to be ahead. For a
  // whole warp.
  __device__ __forceinline__ Watch(const Exchange& x, const int* own, const int* entered_flag, const int* sent_flag,
                                   int epoch, u32 most)
      : began(clock_ns()) {
    const auto has_reached = [&](int flag) { return static_cast<u32>(ahead(flag, epoch)) <= most; };
    for (int spin = 1; complete && __any_sync(ALL, sent == 0); ++spin) {
      const long long now = clock_ns();
      // In this order: who has sent has entered.
      const bool has_sent = has_reached(load_acquire(sent_flag));
      if (entered == 0 && has_reached(load_relaxed(entered_flag))) entered = now;
      if (sent == 0 && has_sent) sent = now;
      if (spin % 16 == 0) complete = !Glance(x, own).trouble() && !__any_sync(ALL, now - began > x.timeout_ns);
    }
    // What kernels before have counted is there then.
    asm volatile("griddepcontrol.wait;" ::: "memory");
  }

  __device__ __forceinline__ long long waited(int rank) const { return max(sent - __shfl_sync(ALL, sent, rank), 0ll); }
};

__device__ __forceinline__ void add_to(long long* at, long long value) { *at = __ldcg(at) + value; }

__device__ __forceinline__ void count_wait(long long* sum_max_waits, long long waited) {
  add_to(sum_max_waits, waited);
  sum_max_waits[1] = max(__ldcg(sum_max_waits + 1), waited);
  add_to(sum_max_waits + 2, waited > 0);
}

// For a block; `entered` and `sent` are the first words of their fields in the half of `epoch`.
__device__ __forceinline__ void count_dispatch_waits(const Exchange& x, const int* own, int entered, int sent,
                                                     int epoch, long long* words) {
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x, peer = min(lane, WORLD - 1);
  const Watch seen(x, own, own + entered + peer, own + sent + peer, epoch, ANY_AHEAD);
  if (!seen.complete) return;
  const long long waited = seen.waited(x.rank);
  if (lane == 0) words[BEGAN + (epoch & 1)] = seen.began;
  if (lane >= WORLD) return;
  long long* const row = words + HEAD + lane * FIELDS;
  count_wait(row + DISPATCH_NS, waited);
  add_to(row + LATE_NS, max(waited - (seen.sent - seen.entered), 0ll));
}

// For a block; `sent` is the first word of the field in the half of `epoch`.
__device__ __forceinline__ void count_combine_waits(const Exchange& x, const int* own, int sent, int epoch,
                                                    long long* words) {
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x, peer = min(lane, WORLD - 1);
  const Watch seen(x, own, own + sent + peer, own + sent + peer, epoch, 0);
  if (!seen.complete) return;
  const long long waited = seen.waited(x.rank);
  long long last = seen.sent;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) last = max(last, __shfl_xor_sync(ALL, last, d));
  if (lane == 0) {
    add_to(words + STEPS, 1);
    add_to(words + STEP_NS, last - __ldcg(words + BEGAN + (epoch & 1)));
  }
  if (lane < WORLD) count_wait(words + HEAD + lane * FIELDS + COMBINE_NS, waited);
}
