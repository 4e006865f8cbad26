// The clock that bounds waits, and how long blocks of a launch wait for each other, for inclusion.

#ifndef MOE_RUNTIME_CLOCK
#define MOE_RUNTIME_CLOCK

constexpr long long PATIENCE_NS = 30'000'000'000;

__device__ __forceinline__ long long clock_ns() {
  long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// The time since `start`, which is set if it is 0, is up after PATIENCE_NS: the kernel ends in an error.
__device__ __forceinline__ void keep_patience(long long& start) {
  const long long now = clock_ns();
  if (start == 0) start = now;
  if (now - start > PATIENCE_NS) __trap();
}

#endif
