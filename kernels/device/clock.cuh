// The clock that bounds waits, for inclusion.

#ifndef MOE_RUNTIME_CLOCK
#define MOE_RUNTIME_CLOCK

__device__ __forceinline__ long long clock_ns() {
  long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

#endif
