// Barriers in shared memory at which threads and bulk copies arrive, for inclusion. Functions use shared-memory
// addresses.

#ifndef MOE_RUNTIME_MBARRIER
#define MOE_RUNTIME_MBARRIER

#include "clock.cuh"
#include "numbers.cuh"

__device__ __forceinline__ u32 shared_address(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier, u32 count = 1) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// One lane arrives for the whole warp, ordered after the other lanes by `__syncwarp`. racecheck does not see that order
// and knows only what the arriving thread did before. With EACH_LANE_ARRIVES, set by `research.sanitize`, all lanes
// arrive.
#ifdef EACH_LANE_ARRIVES
constexpr u32 ARRIVALS_OF_WARP = 32;
#else
constexpr u32 ARRIVALS_OF_WARP = 1;
#endif

__device__ __forceinline__ void barrier_arrive_warp(u32 barrier) {
  __syncwarp();
  if (ARRIVALS_OF_WARP == 32 || (threadIdx.x & 31) == 0) barrier_arrive(barrier);
}

// Arrives, and adds `bytes` of copies to those that the phase expects.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of `parity` has ended. Before the first phase, parity 1 counts as ended.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (!done);
}

// The same, at most some `ns` long. The hardware may give up before.
__device__ __forceinline__ void barrier_wait_for(u32 barrier, u32 parity, u32 ns) {
  const u32 since = static_cast<u32>(clock_ns());
  u32 done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3;\nselp.b32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity), "r"(ns)
                 : "memory");
  } while (!done && static_cast<u32>(clock_ns()) - since < ns);
}

// Starts a bulk copy into shared memory that belongs to the phase of `barrier`. Addresses and size are multiples of 16
// bytes.
__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// The same with an L2 cache policy.
__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// L2 policies: evict these lines before all others, or after all others.
__device__ __forceinline__ u64 policy_of_first_out() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ u64 policy_of_last_out() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

#endif
