// Shared memory and barriers of a block, and the phases of its ring, for inclusion by tma_gemm.cu.

#ifndef MOE_RUNTIME_TMA_BLOCK
#define MOE_RUNTIME_TMA_BLOCK

#include "tma_loads.cuh"
#include "tma_tiles.cuh"

extern __shared__ __align__(1024) u8 shared[];

// `shape.shared_bytes` of shapes.py is the size.
struct Block {
  u8* staging;    // of what is stored
  uint2* table;   // e4m3 numbers of scale codes, if weights are expanded
  float* scales;  // of all stages
  u64* barriers;
  int4* tiles;  // that the producers announce to the math warps: start, rows, expert, column
  Group* groups;
  int* row_indices;  // of the rows of the tile that is being loaded, if they are gathered
  u64* told;         // barriers of the other block's maxima, of each warp for two tiles
  u32* maxima;
  u32 ring, full, empty, known, ended;  // addresses of the stages, and of barriers
  u32 packed, packed_full;              // of the ring of packed weights and its barriers
  u32 rank;                             // in the cluster
  int wg, warp;                         // of this thread

  __device__ __forceinline__ explicit Block(int num_groups)
      : staging(shared + STAGES * STAGE_BYTES + PACKED_BYTES),
        table((uint2*)(staging + STAGING_BYTES)),
        scales((float*)(staging + STAGING_BYTES + TABLE_BYTES)),
        barriers((u64*)((u8*)scales + STAGES * SCALE_BYTES)),
        tiles((int4*)(barriers + 2 * (STAGES + PACKED) + TILES_AHEAD + TURN_BARRIERS)),
        groups((Group*)(tiles + TILES_AHEAD)),
        row_indices((int*)(groups + num_groups + 1)),
        told((u64*)(row_indices + ROW_INDICES)),
        maxima((u32*)(told + 2 * MATH_WARPS)),
        ring(shared_address(shared)),
        full(shared_address(barriers)),
        empty(full + 8 * STAGES),
        known(empty + 8 * STAGES),
        ended(known + 8 * TILES_AHEAD),
        packed(ring + STAGES * STAGE_BYTES),
        packed_full(ended + 8 * TURN_BARRIERS),
        rank(cluster_rank()),
        wg(uniform(threadIdx.x / 128)),
        warp(uniform(threadIdx.x / 32)) {}

  // Called by one thread.
  __device__ __forceinline__ void init_barriers() const {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + 8 * s, 1 + OF_COPIES + OF_ROWS + OF_EXPANSION);
      barrier_init(empty + 8 * s, MATH_WARPS * TEAM * ARRIVALS_OF_WARP);
    }
    for (int i = 0; i < TILES_AHEAD; ++i) barrier_init(known + 8 * i, 1);
    if (FEW) barrier_init(ended, 1);
    for (int s = 0; s < PACKED; ++s) {
      barrier_init(packed_full + 8 * s, 1);
      barrier_init(packed_full + 8 * (PACKED + s), 4 * ARRIVALS_OF_WARP);
    }
    for (int i = 0; i < 2 * MATH_WARPS && PAIRED; ++i) barrier_init(shared_address(told) + 8 * i, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

// A tile starts at the first stage and goes round the ring until K is done. Bit s of a phase: whether all previous
// tiles used stage s an odd number of times. Bit s of `used`: whether one tile does.
struct RingPhases {
  u32 now = 0, used = 0;

  __device__ __forceinline__ explicit RingPhases(int k_blocks) {
    for (int s = 0; s < STAGES; ++s) used |= (u32)((k_blocks - s + STAGES - 1) / STAGES & 1) << s;
  }

  __device__ __forceinline__ u32 of_next_tile() {
    u32 phase = now;
    now ^= used;
    return phase;
  }
};

// Waits until the kernel before this one has ended.
__device__ __forceinline__ void wait_for_rows() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;"); }

#endif
