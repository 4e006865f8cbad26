// Copies of shared memory to global memory by the copy engine, for inclusion.

#ifndef MOE_RUNTIME_BULK_STORE
#define MOE_RUNTIME_BULK_STORE

#include "mbarrier.cuh"

// A copy of shared memory to any mapped global memory, done by the copy engine: 16-byte aligned, whole 16 bytes.
__device__ __forceinline__ void bulk_store(u64 to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until all but the last PENDING groups of this thread have read their sources.
template <int PENDING>
__device__ __forceinline__ void bulk_await_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Until all that this thread has copied can be seen by it, but for the last PENDING groups.
template <int PENDING = 0>
__device__ __forceinline__ void bulk_await() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

// What threads have stored to shared memory is seen by copies that are started after a barrier.
__device__ __forceinline__ void bulk_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#endif
