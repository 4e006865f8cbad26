// Grouped GEMM for Hopper that feeds operands to the tensor cores as they are stored. One warpgroup of producers fills
// a ring in shared memory by TMA (gathered rows one by one); two warpgroups multiply by wgmma. Where threads load
// packed weights into registers, or expand them in memory (EXPAND without PACKED), a fourth warpgroup expands. Where
// packed weights have a ring of their own (PACKED), the producers use two warps, and two more warpgroups expand.
//
// A tile is 128 rows times two halves of 128 weight rows: 256 columns of a result, or gate and up of the same 128
// columns of a gated one. Each math warpgroup multiplies 64 of the rows. Tiles of at most 64 rows alternate between the
// two warpgroups: one multiplies while the other stores. With CLUSTER 2, the two blocks of a cluster work on two row
// tiles of the same columns and share the weights. For the odd row tile of a group they work on two column tiles and
// share the rows. If the last round of plain tiles has work for at most half of the clusters, its tiles are halved
// along the columns.
//
// FEW, for a few rows of each group, has tiles of ROWS 8, 16 or 32 times 128 weight rows, which are gate and up of 64
// columns of a gated result. One warpgroup multiplies, and an SM has two blocks. In a cluster of two, which a gated
// result with block scales needs, the blocks work on both halves of 128 columns and tell each other the largest values
// of a row. Here the weights are the operand of 64 rows, twice, and the rows that of 8, 16 or 32 columns: each sum is
// of the same products in the same order, and has the same bits.
//
// TALL, for weights that threads expand, has tiles of 256 ROWS times 128 weight rows, which are gate and up of 64
// columns of a gated result. A weight is expanded once for 256 rows. Each math warpgroup multiplies two halves of 64
// rows, 128 apart, or one, where the group has no rows in the second. In a cluster of two the blocks work on both
// halves of 256 weight rows, share the rows, and tell each other the largest values of a row of a gated result with
// block scales.
//
// Macros: ROWS (of a tile), FP8 (1: e4m3 with fp32 scales of 1x128 and 128x128; 0: bf16), STAGES, CLUSTER 1 or 2,
// GATHER (rows through row_index), ACTIVATED (the result is activated), GATED (and the weights are gate and up),
// FUNCTION (`ActivationFunction.code`), GATE_SOFTCAP and UP_SOFTCAP (of `Activation`; none if not defined), ORDER
// (`GateUpOrder.code`, 0 for none), OUT (0 bf16, 1 fp16, 2 fp32, 3 e4m3 with 1x128 scales), EXTRAS (row scale, expert
// scales or bias exist), A_BOX (rows of a box of the rows' tensor map), TMA_SCALES (TMA copies the scales too, so that
// one thread produces contiguous rows; needs FP8, 4 stages, scales of a row a multiple of 4), SHORT_BLOCKS (the columns
// of an activated result end within a block of 128, and so do gate and up unless interleaved), EXPAND (weights along K
// that share a block scale where weights are expanded, 16 of `nvfp4` or 32 of `mxfp4`; 0 if they are stored as they are
// multiplied), PACKED (stages of a ring of packed weights; 0 if threads load them into registers), AHEAD (1: weights
// are expanded in memory instead), EACH_LANE_ARRIVES (of mbarrier.cuh; not defined but by `research.sanitize`).
//
// The last stage of K may be short, too: past its end TMA writes zeros, which add nothing.
//
// Sizes are in tma_sizes.cuh, shared memory and barriers in tma_block.cuh, the order of tiles in tma_tiles.cuh.
// Producers are in tma_producer.cuh, their copies in tma_loads.cuh. Weights are expanded in tma_expand.cuh and
// tma_ahead.cuh. Consumers are in tma_consumer.cuh, products in tma_products.cuh, what is stored in tma_epilogue.cuh.

#include "tma_consumer.cuh"
#include "tma_producer.cuh"

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, FEW ? 2 : 1)
    tma_gemm(const __grid_constant__ TensorMap a_map,
#if EXPAND
             const u8* w_units,
#else
             const __grid_constant__ TensorMap w_map,
#endif
#if AHEAD
             const __grid_constant__ TensorMap w_map, u8* ring, u32* ring_counters, int ring_slots,
#endif
             const __grid_constant__ TensorMap scales_map, const int* row_index, const float* a_scales,
             const float* w_scales, Extras extras, u8* out, long long out_stride, float* out_scales, const int* offsets,
             const int* expert_ids, const int* num_active, int num_groups, int num_experts, int capacity, int columns,
             int k_blocks, int band_width, int settled, float alpha, float gate_limit, float up_limit, float up_offset,
             const void* topk_idx, const float* route_weights, int num_ids, int id_bytes, int first_id,
             int loads_after_ns) {
  const Block block(num_groups);
  const int tiles_n = ceil_div(columns, ITEM_COLUMNS);
  if (threadIdx.x == 32) block.init_barriers();
  __syncwarp();
  enter_cluster();
  if (threadIdx.x == 64) {
#if !EXPAND || AHEAD
    asm volatile("prefetch.tensormap [%0];" ::"l"(&w_map) : "memory");
#endif
    asm volatile("prefetch.tensormap [%0];" ::"l"(&a_map) : "memory");
  }
#if EXPAND
  fill_table(block.table);
#endif
  // This kernel may have started before the one that writes its rows has ended. If `settled`, that one has not written
  // the table of groups, which then can be read, and the weights of the first tile loaded, before it ends. So they can
  // if there are `ids`, which nobody has written since before it began. Weights are loaded `loads_after_ns` later,
  // unless the one before has ended by then: earlier loads would delay those of that one.
  const RoutedIds ids = {FEW ? topk_idx : nullptr, route_weights, num_ids, id_bytes, first_id};
  if (!FEW || !(settled || ids.given())) wait_for_rows();
  // The next kernel is the GEMM that reads these results, or, behind that, the one that combines the rows. That
  // GEMM takes for granted that the groups are known, and so does that combine of the routing of its tokens. The memory
  // in which weights are expanded belongs to others as soon as that kernel begins.
  if ((ACTIVATED || FEW) && !AHEAD && !ids.given()) start_next();
  count_tiles(block.groups, (int2*)block.staging, offsets, ids, expert_ids, num_active, num_groups, num_experts,
              capacity, tiles_n);
  await_cluster();

  const RingPhases phases(k_blocks);
#if AHEAD
  const Strips strips = {ring, ring_counters, ring_slots};
#endif
  if (block.wg == MATH_WGS) {
    if (SHARED_OUT) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
#if AHEAD
    const Sources sources = {&a_map, &w_map, &scales_map, w_units, row_index, a_scales, w_scales, strips};
#elif EXPAND
    const Sources sources = {&a_map, nullptr, &scales_map, w_units, row_index, a_scales, w_scales};
#else
    const Sources sources = {&a_map, &w_map, &scales_map, nullptr, row_index, a_scales, w_scales};
#endif
#if PACKED
    if (block.warp % 4 == 1) fill_ring(block, w_units, ids, num_groups, tiles_n, columns, k_blocks, loads_after_ns);
#endif
    load_tiles(block, sources, ids, phases, num_groups, tiles_n, columns, k_blocks, band_width, loads_after_ns);
#if EXPAND
  } else if (block.wg > MATH_WGS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(EXPANDER_REGISTERS));
#if AHEAD
    expand_strips(block, strips, w_units, num_groups, tiles_n, columns, k_blocks);
#else
    expand_tiles(block, w_units, phases, num_groups, tiles_n, columns, k_blocks, band_width);
#endif
#endif
  } else {
    if (SHARED_OUT) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MATH_REGISTERS));
    if (FEW) wait_for_rows();
    if (FEW && threadIdx.x == 0) barrier_arrive(block.ended);
    if (ids.given()) start_next();
    const Results results = {out,     out_stride, out_scales, &extras,  capacity,
                             columns, alpha,      gate_limit, up_limit, up_offset};
    multiply_tiles(block, phases, k_blocks, results);
  }
  __syncwarp();
  leave_cluster();
}
