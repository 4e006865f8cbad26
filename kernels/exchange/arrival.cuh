// What has landed on this rank, and waiting for it token by token, for inclusion by kernels that read landing records.
//
// Macros: those of signalling.cuh, RECORD_BYTES, DISPATCH_FLAG and TOKEN_COUNT (words of SignalLayout), COUNT_BITS,
// TURN_BIT, MISMATCH (ErrorCode).

#include "signalling.cuh"

// The first block that does a kernel's work.
#ifndef FIRST_BLOCK
#define FIRST_BLOCK 0
#endif

static_assert(RECORD_BYTES % 16 == 0, "RECORD_BYTES: records are read 16 bytes at a time");

// What has landed here, in the half of one epoch.
struct Arrival {
  const u8* records;
  const int* token_flags;
  const int* counts;  // of each source: its number of tokens, plus `tag` if they are for this exchange and epoch
  int max_tokens, tag, epoch;

  __device__ Arrival(const u64 landing, const u64 flags, const int* own, long long landing_half,
                     long long token_flags_half, int max_tokens, int count_tag, int epoch)
      : records(reinterpret_cast<const u8*>(landing) + (epoch & 1) * landing_half),
        token_flags(reinterpret_cast<const int*>(flags + (epoch & 1) * token_flags_half)),
        counts(own + TOKEN_COUNT + (epoch & 1) * WORLD),
        max_tokens(max_tokens),
        tag(tag_of(count_tag, epoch)),
        epoch(epoch) {}

  __device__ const u8* record(int slot) const { return records + static_cast<long long>(slot) * RECORD_BYTES; }

  // Whether a source's tokens are for another exchange; the first block records it. The answer is the same in all
  // blocks: counts no longer change, although such tokens may still land in slots of other sources. For a whole warp.
  __device__ __forceinline__ bool check_sources(const Exchange& x, int phase) const {
    const int lane = threadIdx.x & 31, word = lane < WORLD ? without_sign(__ldcg(counts + lane)) : tag;
    const u32 others = __ballot_sync(ALL, word < tag || word - tag > max_tokens);
    if (others && blockIdx.x == FIRST_BLOCK && lane == __ffs(others) - 1)
      record_failure(x, MISMATCH, lane, phase, epoch, exchange_of(word), exchange_of(tag));
    return others != 0;
  }
};

// Waits until each lane may read its slot: its record has landed, or none will come. Returns whether the wait ended by
// a timeout or a failure. For a whole warp.
__device__ __forceinline__ bool await_slots(const Exchange& x, const int* own, const Arrival& arrived, int slot,
                                            int phase) {
  const int source = slot / arrived.max_tokens, token = slot - source * arrived.max_tokens, epoch = arrived.epoch;
  const int* flag = own + DISPATCH_FLAG + (epoch & 1) * WORLD + min(source, WORLD - 1);
  const int* counts = arrived.counts + min(source, WORLD - 1);
  // Once the flag of epoch - 2 has been seen, the count in this half is that of epoch - 2 or of this epoch, no older
  // one.
  bool recent = ahead(load_acquire(flag), epoch - 2) >= 0;
  auto behind = [&] {
    // Three loads in flight at once. The turn bit of the count says whether it is of this epoch.
    const int flagged = load_relaxed(flag), word = load_relaxed(counts),
              token_flag = load_acquire(arrived.token_flags + slot);
    const int count = without_sign(word) - arrived.tag;
    // The count of another exchange is too small or too large. Token flags that nobody has written are those of epoch
    // 0.
    if (recent && same_turn(word, arrived.tag) && has_token_flags(word) &&
        (token >= count || count > arrived.max_tokens || (token_flag == epoch && epoch != 0)))
      return false;
    if (!recent) recent = ahead(load_acquire(flag), epoch - 2) >= 0;
    return ahead(flagged, epoch) < 0 || ahead(load_acquire(flag), epoch) < 0;
  };
  bool waiting = source < WORLD && behind();
  if (!__any_sync(ALL, waiting)) return false;
  const long long start = clock_ns();
  for (int spin = 1;; ++spin) {
    if (waiting) waiting = behind();
    if (!__any_sync(ALL, waiting)) return false;
    if (spin % 16 != 0) continue;
    if (Glance(x, own).trouble() || too_late(x, waiting, source, start, phase, epoch)) return true;
  }
}
