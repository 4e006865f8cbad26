// The warpgroups that fill the ring, for inclusion by tma_gemm.cu.
//
// One thread starts the copies by TMA, but for gathered rows: a thread of each warp starts those of its rows. All
// threads copy scales that TMA does not copy, and expand weights if these are expanded. With PACKED one warp does all
// but expand, and a second one loads the packed weights.
//
// Macros: those of tma_gemm.cu.

#ifndef MOE_RUNTIME_TMA_PRODUCER
#define MOE_RUNTIME_TMA_PRODUCER

#include "tma_block.cuh"
#include "tma_ahead.cuh"

// Where operands come from.
struct Sources {
  const TensorMap *rows, *weights, *scales;
  const u8* units;  // of weights that are expanded
  const int* row_index;
  const float *row_scales, *weight_scales;
#if AHEAD
  Strips strips;
#endif
};

// A tile that is being loaded, as a thread of the producers sees it.
struct Loading {
  Tile tile;
  int halves;                        // of its weights
  bool shared_rows, shared_weights;  // with the other block of the cluster
  int boxes, row_bytes;              // boxes of rows, and bytes of rows that the leader expects in a stage
  int weight_bytes;                  // of weights, if TMA brings them
  int first_own, own;                // gathered rows that this warp loads
  int row_of_lane = 0;               // index of the one of this lane
  int row_of_ring = 0;               // of weights that are expanded in memory

  __device__ __forceinline__ Loading(const Tile& tile, int halves, int first_own)
      : tile(tile),
        halves(halves),
        shared_rows(TEAM > 1 && !tile.pair_rows),
        shared_weights(TEAM > 1 && tile.pair_rows),
        boxes(GATHER ? 0 : min(BM / A_BOX, ceil_div(tile.rows, A_BOX))),
        row_bytes(boxes * A_BOX * 128),
        weight_bytes(IN_STAGES ? 0 : halves * BOX_BYTES),
        first_own(first_own) {
    int gathered = GATHER ? min(BM, tile.rows) : 0;
    own = max(0, min(32, gathered - first_own));
    if (FEW) row_bytes += gathered * 128;
  }

  __device__ __forceinline__ void load_row_index(const Block& block, const int* row_index) {
    int lane = threadIdx.x % 32;
    if (GATHER && lane < own) row_of_lane = row_index[tile.start + first_own + lane];
    if (ROW_INDICES > 0) {
      __syncwarp();  // those of the last tile have been used
      block.row_indices[first_own + lane] = row_of_lane;
      __syncwarp();
    }
  }

  __device__ __forceinline__ void load_weights(const Block& block, const TensorMap* map, u32 to, u32 ready,
                                               int kb) const {
    if (IN_STAGES) return;
    for (int h = shared_weights ? block.rank : 0; h < halves; h += shared_weights ? TEAM : 1) {
      if (AHEAD)
        load_rows(map, to + h * BOX_BYTES, ready, 0, row_of_ring + (kb * BOXES + h) * BOX_ROWS, shared_weights);
      else load_half(map, to + h * BOX_BYTES, ready, kb * BK, tile.column, h, tile.expert, shared_weights);
    }
  }

  // Rows that lie side by side.
  __device__ __forceinline__ void load_boxes(const Block& block, const TensorMap* map, u32 to, u32 ready,
                                             int kb) const {
    for (int i = shared_rows ? block.rank : 0; i < boxes; i += shared_rows ? TEAM : 1)
      load_rows(map, to + i * A_BOX * 128, ready, kb * BK, tile.start + i * A_BOX, shared_rows);
  }

  // Gathered rows, one by one.
  __device__ __forceinline__ void gather_rows(const Block& block, const TensorMap* map, u32 to, u32 ready,
                                              int kb) const {
    int lane = threadIdx.x % 32;
    auto load_row = [&](int i, int n) { load_rows(map, to + i * 128, ready, kb * BK, n, false); };
    if (FEW && GATHER && lane < own) load_row(lane, row_of_lane);
    if (OF_ROWS > 0 && elected()) {
      int i = first_own, end = first_own + own;
      const int* indices = block.row_indices;
      barrier_expect(ready, own * 128);
#pragma unroll 1
      for (; i + 8 <= end; i += 8) {
        int4 n = *(const int4*)(indices + i), m = *(const int4*)(indices + i + 4);
        load_row(i, n.x), load_row(i + 1, n.y), load_row(i + 2, n.z), load_row(i + 3, n.w);
        load_row(i + 4, m.x), load_row(i + 5, m.y), load_row(i + 6, m.z), load_row(i + 7, m.w);
      }
#pragma unroll 1
      for (; i < end; ++i) load_row(i, indices[i]);
    }
  }
};

// The tiles of a block, by their numbers. From `whole` on, they are halved.
struct Walk {
  const Block& block;
  int num_groups, tiles_n, band_width, step, whole;

  __device__ __forceinline__ Walk(const Block& block, int num_groups, int tiles_n, int band_width)
      : block(block), num_groups(num_groups), tiles_n(tiles_n), band_width(band_width), step(gridDim.x / CLUSTER) {
    int total = block.groups[num_groups].first, rest = total % step;
    whole = HALVES && 2 * rest <= step ? total - rest : total;
  }

  // Tile `t`, in `group` or a later one, and how many halves it has; false past the last tile.
  __device__ __forceinline__ bool find(int t, int& group, Tile& tile, int& halves) const {
    int halved = max(t - whole, 0);
    halves = HALVES && t >= whole ? 1 : BOXES;
    int number = t - ceil_div(halved, 2);
    if (!find_tile(block.groups, num_groups, number, tiles_n, band_width, block.rank, group, tile)) return false;
    tile.column += halved % 2 * HALF;
    return true;
  }
};

// Tells the math warps of tiles, in order. An announcement overwrites the one of TILES_AHEAD tiles ago. That is safe: a
// warp that had not read it would still hold the stages of the later tiles.
struct Announcements {
  int announced = 0;

  __device__ __forceinline__ void announce(const Block& block, bool leader, int4 what) {
    if (leader) {
      block.tiles[announced % TILES_AHEAD] = what;
      barrier_arrive(block.known + 8 * (announced % TILES_AHEAD));
    }
    ++announced;
  }
};

#if PACKED

// Loads packed weights of all tiles of this block into their ring, even blocks of K into even stages. Called by a warp
// that does nothing else. The first stages wait neither for row indices nor, if `settled`, for the kernel before this
// one.
__device__ __forceinline__ void fill_ring(const Block& block, const u8* units, const RoutedIds& ids, int num_groups,
                                          int tiles_n, int columns, int k_blocks, int loads_after_ns) {
  const Walk walk(block, num_groups, tiles_n, 1);
  bool one = elected();
  if (loads_after_ns > 0) barrier_wait_for(block.ended, 0, loads_after_ns);
  __syncwarp();
  int g = 0, halves, early = ids.given() ? EARLY_STAGES : -1;
  PackedRing now(0), next(1);  // of this block of K, and of the next one
  Tile tile;
  Units from;
  for (int t = blockIdx.x / CLUSTER; walk.find(t, g, tile, halves); t += walk.step) {
    from.find(units, tile, columns, k_blocks, 0, UNITS);
    for (int kb = 0; kb < k_blocks; ++kb) {
      if (early-- == 0) wait_for_rows();
      now.await_free(block);
      __syncwarp();
      u32 to = now.units(block), ready = now.full(block);
      if (one) {
        barrier_expect(ready, UNITS * UNIT_BYTES);
#pragma unroll
        for (int u = 0; u < UNITS; ++u) bulk_load(to + u * UNIT_BYTES, from.from(u), UNIT_BYTES, ready);
      }
      from.advance();
      now.advance();
      now.swap(next);
    }
    if (k_blocks % 2) now.swap(next);  // a tile begins with an even stage
  }
}

#endif

#if EXPAND && !AHEAD

// Expands weights of all tiles of this block. Called by each warpgroup that does nothing else: the second of two, or,
// with PACKED, both.
__device__ __forceinline__ void expand_tiles(const Block& block, const u8* units, RingPhases phases, int num_groups,
                                             int tiles_n, int columns, int k_blocks, int band_width) {
  const Walk walk(block, num_groups, tiles_n, band_width);
  Expander expander(block, units, columns, k_blocks);
  int g = 0, halves;
  Tile tile;
  for (int t = blockIdx.x / CLUSTER; walk.find(t, g, tile, halves); t += walk.step) {
    int first = PACKED ? block.wg - MATH_WGS - 1 : TALL ? 1 : 0;
    expander.begin(tile, halves, first);
    int stage = first;
    u32 phase = phases.of_next_tile();
    for (int kb = first; kb < k_blocks; kb += Expander::STEP) {
      barrier_wait(block.empty + 8 * stage, ~phase >> stage & 1);
      __syncwarp();
      expander.expand(block.ring + stage * STAGE_BYTES + A_BYTES, block.full + 8 * stage, k_blocks - 1 - kb);
      stage += Expander::STEP;
      if (stage >= STAGES) stage -= STAGES, phase = ~phase;
    }
  }
}

#endif

// Loads all tiles of this block. Called by the warpgroup.
__device__ __forceinline__ void load_tiles(const Block& block, const Sources& from, const RoutedIds& ids,
                                           RingPhases phases, int num_groups, int tiles_n, int columns, int k_blocks,
                                           int band_width, int loads_after_ns) {
  int thread = threadIdx.x % 128;
  bool leader = thread == 0;
  Announcements tiles;
  u32 round = 0;
  // This thread handles the tiles below `last`. If one thread copies, its whole warp loops, so that values stay
  // warp-uniform.
  int last = block.warp - MATH_WARPS < PRODUCING_WARPS ? 0x7FFFFFFF : 0;
  // The first stages of the first tile, whose weights wait neither for row indices nor, if `settled`, for the kernel
  // before this one.
  int ahead = 0;
  bool begins = FEW;
  const Walk walk(block, num_groups, tiles_n, band_width);
#if IN_REGISTERS
  Expander expander(block, from.units, columns, k_blocks);
#endif
#if AHEAD
  Reader reader(from.strips, k_blocks);
#endif
  int g = 0, halves;
  Tile tile;
  for (int t = blockIdx.x / CLUSTER; t < last; t += walk.step) {
    if (!walk.find(t, g, tile, halves)) break;
    Loading loading(tile, halves, block.warp % 4 * 32);
    bool index_waits = begins && ids.given();
    if (!index_waits) loading.load_row_index(block, from.row_index);
#if IN_REGISTERS
    expander.begin(tile, halves);
#endif
    if (begins) {
      if (leader && !IN_STAGES && loads_after_ns > 0) barrier_wait_for(block.ended, 0, loads_after_ns);
      ahead = IN_STAGES ? 0 : min(ids.given() ? EARLY_STAGES : STAGES, k_blocks);
      for (int s = 0; s < ahead && leader; ++s) {
        barrier_expect(block.full + 8 * s, loading.row_bytes + loading.weight_bytes);
        loading.load_weights(block, from.weights, block.ring + s * STAGE_BYTES + A_BYTES, block.full + 8 * s, s);
      }
      wait_for_rows();
      if (index_waits) loading.load_row_index(block, from.row_index);
      begins = false;
    }
    tiles.announce(block, leader,
                   make_int4(tile.start, tile.rows, tile.expert, tile.column | (halves == 1 ? ONE_HALF : 0)));
    // Scales past the first 128 rows are wanted if there are such rows.
    int scale_boxes = TALL && tile.rows > SCALE_BOX ? 2 : 1;
    [[maybe_unused]] const float* a_scale_further =
        from.row_scales + (long long)(tile.start + min(thread + SCALE_BOX, tile.rows - 1)) * k_blocks;
    const float* a_scale = from.row_scales + (long long)(tile.start + min(thread, tile.rows - 1)) * k_blocks;
    const float* w_scale = from.weight_scales + weight_scales(tile.expert, tile.column, columns, thread) * k_blocks;
    const float* of_second = from.weight_scales + weight_scales(tile.expert, tile.column, columns, 1) * k_blocks;
#if AHEAD
    if (leader) loading.row_of_ring = reader.find(block, phases, tile, halves, g, tiles_n);
#endif
    int stage = 0;
    u32 phase = phases.of_next_tile();
    auto next_stage = [&] {
      if (++stage == STAGES) stage = 0, phase = ~phase;
    };
    for (int kb = 0; kb < k_blocks; ++kb, next_stage()) {
      u32 a = block.ring + stage * STAGE_BYTES, b = a + A_BYTES, ready = block.full + 8 * stage;
      // Warps that do nothing but expand have no part in stages of the other warpgroup. These may be full and free
      // again before a lane looks, which would then wait for a phase that does not come.
      if (TALL && !THREADS_COPY && kb % 2 == 1 && block.warp != MATH_WARPS) continue;
      barrier_wait(block.empty + 8 * stage, ~phase >> stage & 1);
      __syncwarp();  // a late lane would wait for the following round
#if AHEAD
      if (leader && kb == reader.last_stage) reader.go_on();
#endif
      if (leader) {
        bool scales_too = TMA_SCALES && stage == 0, weights_too = !FEW || ahead <= 0;
        int scale_bytes = scales_too ? (scale_boxes * min(BM, SCALE_BOX) + 2) * 16 : 0;
        if (weights_too) barrier_expect(ready, loading.row_bytes + loading.weight_bytes + scale_bytes);
        loading.load_boxes(block, from.rows, a, ready, kb);
        if (weights_too) loading.load_weights(block, from.weights, b, ready, kb);
        if (scales_too) {
          u32 scale = shared_address(block.scales) + round;
          if (TALL) {
            int box = block.rank * SCALE_BOX;
            if (block.rank < scale_boxes) load_rows(from.scales, scale + box * 16, ready, kb, tile.start + box, true);
          } else {
            load_rows(from.scales, scale, ready, kb, tile.start, false);
          }
          bulk_load(scale + BM * 16, w_scale + kb, 16, ready);
          bulk_load(scale + BM * 16 + 16, of_second + kb, 16, ready);
          round = ROUND_BYTES - round;
        }
      }
      --ahead;
      loading.gather_rows(block, from.rows, a, ready, kb);
#if IN_REGISTERS
      // Before copies by threads, for which its fence would wait.
      if (!TALL || kb % 2 == 0) expander.expand(b, ready, k_blocks - 1 - kb);
#endif
      if (THREADS_COPY) {
        u32 scale = shared_address(block.scales) + stage * SCALE_BYTES;
        if (thread < BM) copy_word(scale + thread * 4, a_scale + kb);
        if (TALL) copy_word(scale + (thread + SCALE_BOX) * 4, a_scale_further + kb);
        if (thread < 2) copy_word(scale + BM * 4 + thread * 4, w_scale + kb);
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(ready) : "memory");
      }
    }
  }
#if AHEAD
  if (leader) reader.end(block, phases);
#endif
  if (begins) wait_for_rows();  // the next kernel takes the end of this one for the end of the one before, too
  tiles.announce(block, leader, make_int4(0, NO_MORE, 0, 0));
}

#endif
