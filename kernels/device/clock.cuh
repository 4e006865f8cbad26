// The clock that bounds waits, and how long blocks of a launch wait for each other, for inclusion.

#ifndef MOE_RUNTIME_CLOCK
#define MOE_RUNTIME_CLOCK

constexpr long long PATIENCE_NS = 30'000'000'000;

__device__ __forceinline__ long long clock_ns() {
  long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

#endif
