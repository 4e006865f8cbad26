// Clusters of blocks, their copies by TMA, and when stages are given back, for inclusion by tma_gemm.cu.

#ifndef MOE_RUNTIME_TMA_LOADS
#define MOE_RUNTIME_TMA_LOADS

#include "tma_sizes.cuh"

// Makes a value warp-uniform for the compiler: tensor core instructions need uniform registers.
__device__ __forceinline__ u32 uniform(u32 x) { return __shfl_sync(~0u, x, 0); }

// True in one lane of the warp. The compiler knows that it is one, and starts copies there without a loop over lanes.
__device__ __forceinline__ bool elected() {
  u32 is;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(is));
  return is != 0;
}

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank = 0;
  if (CLUSTER > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The first barrier of the cluster, behind which the barriers of the other block are initialized.
__device__ __forceinline__ void enter_cluster() {
  if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void await_cluster() {
  if (CLUSTER > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// The last barrier: the other block may still have to arrive at barriers in this block's memory.
__device__ __forceinline__ void leave_cluster() {
  if (CLUSTER > 1) {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  }
}

// The cluster address of `address` in the shared memory of block `rank`.
__device__ __forceinline__ u32 address_at(u32 address, u32 rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// The arrival publishes no generic stores, so it needs no cluster fence, which would cost a quarter.
__device__ __forceinline__ void barrier_arrive_there(u32 barrier, u32 count) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void load_rows(const TensorMap* map, u32 to, u32 barrier, int k, int row, bool multicast) {
  if (multicast) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(k), "r"(row), "h"((u16)3)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(k), "r"(row)
        : "memory");
  }
}

// One half of a weight tile: BOX_ROWS rows of `expert` from `column`. The map is [expert][half][row][k], or,
// interleaved, [expert][row][half][k]; without gate and up there is one half of all rows.
__device__ __forceinline__ void load_half(const TensorMap* map, u32 to, u32 barrier, int k, int column, int half,
                                          int expert, bool multicast) {
  int c1 = GATED ? column : column + half * HALF, c2 = GATED ? half : 0;
  if (GATED && ORDER == UP_GATE) c2 = 1 - half;
  if (GATED && ORDER == INTERLEAVED) {
    c1 = half;
    c2 = column;
  }
  if (multicast) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(k), "r"(c1), "r"(c2), "r"(expert), "h"((u16)3)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(k), "r"(c1), "r"(c2), "r"(expert)
        : "memory");
  }
}

// Called by a warp that has consumed a stage. Lane r arrives at `barrier` in the memory of block r of the team, because
// the other block may also load into the stage. `share` is 2 if the warp also arrives for the other warpgroup.
__device__ __forceinline__ void release(u32 barrier, u32 share) {
#ifdef EACH_LANE_ARRIVES
  if (TEAM == 1) barrier_arrive(barrier, share);
  for (u32 r = 0; r < TEAM && TEAM > 1; ++r) barrier_arrive_there(address_at(barrier, r), share);
#else
  if (threadIdx.x % 32 >= TEAM) return;
  if (TEAM == 1) barrier_arrive(barrier, share);
  if (TEAM > 1) barrier_arrive_there(barrier, share);
#endif
}

__device__ __forceinline__ void copy_word(u32 to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

#endif
