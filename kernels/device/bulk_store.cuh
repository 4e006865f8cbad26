// Copies from shared to global memory by the copy engine, for inclusion.

#ifndef MOE_RUNTIME_BULK_STORE
#define MOE_RUNTIME_BULK_STORE

#include "mbarrier.cuh"

// Copies shared memory to any mapped global memory by the copy engine. Addresses and size are multiples of 16 bytes.
__device__ __forceinline__ void bulk_store(u64 to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but the last PENDING groups of this thread have read their sources.
template <int PENDING>
__device__ __forceinline__ void bulk_await_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Waits until this thread can see everything that it has copied, except the last PENDING groups.
template <int PENDING = 0>
__device__ __forceinline__ void bulk_await() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Makes this thread's stores to shared memory visible to copies that are started after a barrier.
__device__ __forceinline__ void bulk_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#endif
