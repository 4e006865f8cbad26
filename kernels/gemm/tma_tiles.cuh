// Which block works on what and in which order, for inclusion by tma_gemm.cu.

#ifndef MOE_RUNTIME_TMA_TILES
#define MOE_RUNTIME_TMA_TILES

#include "tma_sizes.cuh"

// Row of the weight's scales, counted over all experts, for half 0 or 1 of a tile (128 rows share one). If gate and up
// are interleaved, both halves use both rows, the first one for the first 64 columns. If tiles are NARROW, only gate
// and up that are not interleaved have different ones.
__device__ __forceinline__ long long weight_scales(int expert, int column, int columns, int half) {
  int blocks = (GATED ? 2 * columns : columns) + 127 >> 7, block = column / 128 + (half > 0);
  if (GATED) block = column / 128 + ((half > 0) == (ORDER == GATE_UP) ? blocks_of(columns) : 0);
  if (GATED && SHORT_BLOCKS && ORDER != INTERLEAVED) blocks = 2 * blocks_of(columns);
  if (GATED && ORDER == INTERLEAVED) block = column / 64 + (!NARROW && half > 0);
  if (!GATED && NARROW) block = column / 128;
  return (long long)expert * blocks + min(block, blocks - 1);
}

// Number of work items of a group; a cluster works on one at a time.
__device__ __forceinline__ int tiles_of(int rows, int tiles_n) {
  int tiles_m = ceil_div(rows, BM);
  if (TEAM == 1 || TALL) return tiles_m * tiles_n;
  return tiles_m / 2 * tiles_n + tiles_m % 2 * ceil_div(tiles_n, 2);
}

// Called by the whole block: lists the groups that have tiles, and counts these. A search then passes over no others,
// of which there are many where each of few tokens has its own experts. `groups[num_groups]` has the number of all
// tiles as `first`, and that of the groups that are listed as `rows`. Each warp takes 32 groups, so that memory is
// mostly waited for once; `totals` has the tiles and groups of each warp.
__device__ void count_tiles(Group* groups, int2* totals, const int* offsets, const RoutedIds& ids,
                            const int* expert_ids, const int* num_active, int num_groups, int num_experts, int capacity,
                            int tiles_n) {
  constexpr int WARPS = THREADS / 32;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, total = 0, listed = 0;
  for (int base = 0; base < num_groups; base += 32 * WARPS) {
    int g = base + threadIdx.x, rows = 0, expert = -1, active = num_groups;
    int span[2] = {0, 0};
    if (ids.given()) ids.find_offsets<1>(g, num_groups, span);
    if (num_active) active = min(num_groups, *num_active);
    if (g < num_groups) {
      if (!ids.given()) span[0] = offsets[g], span[1] = offsets[g + 1];
      rows = min(span[1], capacity) - span[0];
      expert = expert_ids[g];
    }
    if (g >= active || rows < 0 || expert < 0 || expert >= num_experts) rows = 0;
    int tiles = tiles_of(rows, tiles_n), last = tiles;
    for (int step = 1; step < 32; step *= 2) {
      int before = __shfl_up_sync(~0u, last, step);
      if (lane >= step) last += before;
    }
    u32 with_tiles = __ballot_sync(~0u, tiles > 0);
    if (lane == 31) totals[warp] = {last, __popc(with_tiles)};
    __syncthreads();
    int2 of_warp = {0, 0};
    if (lane < WARPS) of_warp = totals[lane];
    int first = total + __reduce_add_sync(~0u, lane < warp ? of_warp.x : 0) + last - tiles;
    int place = listed + __reduce_add_sync(~0u, lane < warp ? of_warp.y : 0) + __popc(with_tiles & ((1u << lane) - 1));
    if (tiles > 0) groups[place] = {first, span[0], rows, expert};
    total += __reduce_add_sync(~0u, of_warp.x);
    listed += __reduce_add_sync(~0u, of_warp.y);
    __syncthreads();
  }
  if (threadIdx.x == 0) groups[listed].first = groups[num_groups].first = total, groups[num_groups].rows = listed;
  __syncthreads();
}

// The tile of this block in work item `index`. `g` is a group at or before the tile's, and advances to it. False past
// the last item.
__device__ __forceinline__ bool find_tile(const Group* groups, int num_groups, int index, int tiles_n, int band_width,
                                          u32 rank, int& g, Tile& tile) {
  if (index >= groups[num_groups].first) return false;
  if (FEW) {
    // The lanes of the warp look at 32 groups at a time.
    for (int lane = threadIdx.x % 32;; g += 32) {
      u32 behind = __ballot_sync(~0u, index < groups[min(g + 1 + lane, num_groups)].first);
      if (behind != 0) {
        g += __ffs(behind) - 1;
        break;
      }
    }
  } else {
    while (index >= groups[g + 1].first) ++g;
  }
  Group group = groups[g];
  int u = index - group.first, tiles_m = ceil_div(group.rows, BM);
  if (FEW) {
    int n = u / tiles_m, m = u - n * tiles_m;
    tile = {group.start + m * BM, group.rows - m * BM, group.expert, n * ITEM_COLUMNS, false};
    if (PAIRED) tile.column += (int)rank * TILE_COLUMNS;
    return true;
  }
  if (TALL) {
    // Bands of columns, as below.
    int band = u / (band_width * tiles_m) * band_width, width = min(band_width, tiles_n - band);
    u -= band * tiles_m;
    int m = u / width, n = band + u % width;
    tile = {group.start + m * BM, group.rows - m * BM, group.expert, n * ITEM_COLUMNS + (int)rank * TILE_COLUMNS,
            false};
    return true;
  }
  int odd = tiles_m % CLUSTER, m, n;
  tiles_m /= CLUSTER;
  // The odd row tile comes after each band of columns, or after all of them.
  int span = tiles_m <= FEW_PAIRS ? band_width : tiles_n, of_span = tiles_m * span + odd * ceil_div(span, 2);
  int start = u / of_span * span, width = min(span, tiles_n - start);
  u %= of_span;
  tile.pair_rows = u < tiles_m * width;
  if (tile.pair_rows) {
    // Bands of columns, all rows of a band before the next: concurrent tiles share rows and weights in L2.
    int band = u / (band_width * tiles_m) * band_width;
    width = min(band_width, width - band);
    u -= band * tiles_m;
    m = u / width * CLUSTER + (int)rank;
    n = start + band + u % width;
  } else {
    m = tiles_m * CLUSTER;
    n = start + (u - tiles_m * width) * CLUSTER + (int)rank;
  }
  tile.start = group.start + m * BM;
  tile.rows = group.rows - m * BM;
  tile.expert = group.expert;
  tile.column = n * TILE_COLUMNS;
  return true;
}

#endif
