// The warpgroups that multiply what is in the ring and store the sums, for inclusion by tma_gemm.cu.

#ifndef MOE_RUNTIME_TMA_CONSUMER
#define MOE_RUNTIME_TMA_CONSUMER

#include "tma_block.cuh"
#include "tma_epilogue.cuh"
#include "tma_products.cuh"

// Of the kernel's arguments, what the results depend on.
struct Results {
  u8* out;
  long long stride;  // in elements
  float* scales;
  const Extras* extras;
  int capacity, columns;
  float alpha, gate_limit, up_limit, up_offset;
};

constexpr u32 STAGE_STEP = STAGE_BYTES >> 4, HALF_STEP = HALF_BYTES >> 4;  // in descriptors

// Position of the scales of the other round of stages.
__device__ __forceinline__ u32 other_round(u32 round) { return TMA_SCALES ? ROUND_BYTES - round : 0; }

#if ROWS < 128  // few rows

// acc = weights * rows^T over K. `freed` is the barrier of the first stage that says that a stage is free.
#if FP8
__device__ __forceinline__ void sum_products(float (&acc)[SUMS], const Block& block, u32 rows, u32 weights, u32 phase,
                                             u32 freed, int k_blocks) {
  int stage = 0;
#pragma unroll
  for (int i = 0; i < SUMS; ++i) acc[i] = 0.0f;
  float part[PARTIAL_SUMS];
  for (int kb = 0; kb < k_blocks; ++kb) {
    barrier_wait(block.full + 8 * stage, phase >> stage & 1);
    multiply(part, weights + stage * STAGE_STEP, rows + stage * STAGE_STEP, false);
    add_up(acc, part, block.scales + stage * (SCALE_BYTES / 4));
    release(freed + 8 * stage, 1);
    if (++stage == STAGES) stage = 0, phase = ~phase;
  }
}
#else
__device__ __forceinline__ void sum_products(float (&acc)[SUMS], const Block& block, u32 rows, u32 weights, u32 phase,
                                             u32 freed, int k_blocks) {
  int stage = 0, before = 0;
  for (int kb = 0; kb < k_blocks; ++kb) {
    barrier_wait(block.full + 8 * stage, phase >> stage & 1);
    multiply(acc, weights + stage * STAGE_STEP, rows + stage * STAGE_STEP, kb > 0);
    mma_wait<1>();
    if (kb > 0) release(freed + 8 * before, 1);
    before = stage;
    if (++stage == STAGES) stage = 0, phase = ~phase;
  }
  mma_wait<0>();
  keep(acc);
  release(freed + 8 * before, 1);
}
#endif

#elif FP8  // many rows

// Where a thread finds the scales of its rows (two, with TALL of each half) and of both halves of the weights.
struct ScaleAddresses {
  // Bytes between rows, between the halves, and between stages.
  static constexpr u32 OF_ROW = TMA_SCALES ? 16 : 4, OF_STAGE = TMA_SCALES ? 4 : SCALE_BYTES;
  u32 rows, halves;

  __device__ __forceinline__ ScaleAddresses(const Block& block, int row) {
    // Zero, hidden from the compiler, which would move loads from uniform addresses to uniform registers.
    u32 zero;
    asm("{\n.reg .u32 t;\nmov.u32 t, %%laneid;\nshr.u32 %0, t, 5;\n}" : "=r"(zero));
    rows = shared_address(block.scales) + row * OF_ROW;
    halves = shared_address(block.scales) + BM * OF_ROW + zero;
  }

#if ROWS > 128
  // Loads those of a stage for as many halves of the rows, if `now`.
  template <int NUMBER>
  __device__ __forceinline__ void load(Factors& factors, int stage, u32 of_round, bool now) const {
    u32 at = of_round + stage * OF_STAGE;
#pragma unroll
    for (int i = 0; i < 2 * NUMBER; ++i)
      load_word_or_zero(factors.a[i], rows + at + (i / 2 * 128 + i % 2 * 8) * OF_ROW, now);
    load_word_or_zero(factors.w[0], halves + at, now);
    if (GATED) load_word_or_zero(factors.w[1], halves + at + OF_ROW, now);
  }
#else
  // Loads those of a stage, if `now`.
  __device__ __forceinline__ void load(Factors& factors, int stage, u32 of_round, bool now) const {
    u32 at = of_round + stage * OF_STAGE;
    load_word(factors.a[0], rows + at, now);
    load_word(factors.a[1], rows + at + 8 * OF_ROW, now);
    load_word(factors.w[0], halves + at, now);
    load_word(factors.w[1], halves + at + OF_ROW, now);
  }
#endif
};

#if ROWS > 128

// Where a warpgroup is in a tile.
struct Progress {
  int left, stage;  // blocks of K, the first of which is in `stage`
  u32 phase, round;
};

// Adds products of the first NUMBER halves of the rows while scales are plain, from stage 0 on. Returns whether K is
// done. Else the MMAs of the first half of the next stage are in flight.
template <int NUMBER>
__device__ __forceinline__ bool add_plain_products(float (&acc)[SUMS], float (&part)[PARTIAL_SUMS], Progress& at,
                                                   const Block& block, const ScaleAddresses& scales, u32 a, u32 b,
                                                   u32 freed, int share) {
  Factors factors;
  scales.load<NUMBER>(factors, 0, at.round, true);
  for (;; at.left -= STAGES, at.phase = ~at.phase, at.round = other_round(at.round)) {
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
      int next = (s + 1) % STAGES;
      multiply(part, a + s * STAGE_STEP, b + s * STAGE_STEP);
      if (!all_of_warpgroup(block.wg, factors.multiply<NUMBER>())) {
        at.stage = s;
        return false;
      }
      if (NUMBER > 1) {
        mma_wait<0>();
        add_up<0, true>(acc, part, factors);
        multiply(part, a + s * STAGE_STEP + HALF_STEP, b + s * STAGE_STEP);
      }
      if (at.left > s + 1) barrier_wait(block.full + 8 * next, (next ? at.phase : ~at.phase) >> next & 1);
      mma_wait<0>();
      release(freed + 8 * s, share);
      scales.load<NUMBER>(factors, next, next ? at.round : other_round(at.round), at.left > s + 1);
      add_up<(NUMBER - 1) * PARTIAL_SUMS, true>(acc, part, factors);
      if (at.left <= s + 1) return true;
    }
  }
}

// acc += a * b^T over K, with the scales of both. `freed` is the barrier of the first stage that says that a stage is
// free, at which this warp arrives for `share` warps. `round` is where the scales of the first round of stages are. The
// second half of the rows lies 128 further; `one_half` leaves it out.
__device__ __forceinline__ void add_products(float (&acc)[SUMS], const Block& block, const ScaleAddresses& scales,
                                             u32 a, u32 b, u32 phase, u32 freed, int share, int k_blocks, bool one_half,
                                             u32 round) {
  float part[PARTIAL_SUMS];
  Progress at = {k_blocks, 0, phase, round};
  bool narrow = uniform(one_half);
  // See below for why stages are unrolled, and when barriers are waited for and scales read.
  barrier_wait(block.full, phase & 1);
  if (narrow) {
    if (add_plain_products<1>(acc, part, at, block, scales, a, b, freed, share)) return;
  } else {
    if (add_plain_products<2>(acc, part, at, block, scales, a, b, freed, share)) return;
  }
  // The rest of the tile.
  Factors factors;
  for (at.left -= at.stage;;) {
    scales.load<2>(factors, at.stage, at.round, true);
    factors.multiply<2>();
    mma_wait<0>();
    add_up<0, false>(acc, part, factors);
    if (!narrow) {
      multiply(part, a + at.stage * STAGE_STEP + HALF_STEP, b + at.stage * STAGE_STEP);
      mma_wait<0>();
      add_up<PARTIAL_SUMS, false>(acc, part, factors);
    }
    release(freed + 8 * at.stage, share);
    if (--at.left == 0) return;
    if (++at.stage == STAGES) at.stage = 0, at.phase = ~at.phase, at.round = other_round(at.round);
    barrier_wait(block.full + 8 * at.stage, at.phase >> at.stage & 1);
    multiply(part, a + at.stage * STAGE_STEP, b + at.stage * STAGE_STEP);
  }
}

#else  // tiles of 128 rows

// acc += a * b^T over K, with the scales of both. `freed` is the barrier of the first stage that says that a stage is
// free, at which this warp arrives for `share` warps. `round` is where the scales of the first round of stages are.
__device__ __forceinline__ void add_products(float (&acc)[SUMS], const Block& block, const ScaleAddresses& scales,
                                             u32 a, u32 b, u32 phase, u32 freed, int share, int k_blocks, bool one_half,
                                             u32 round) {
  int left = k_blocks, odd = 0;
  Factors factors;
  float part[PARTIAL_SUMS];
  auto products = [&](int s, int half) { multiply(part, a + s * STAGE_STEP, b + s * STAGE_STEP + half * HALF_STEP); };
  // Unrolled over the stages, so that their addresses are constants: work outside the tensor cores leaves them idle
  // whenever both warpgroups do such work. The wait for the next stage overlaps with the MMAs of this one, and
  // the next scales are read between the last multiply-adds.
  // A tile of one half uses the slow path, too; the test of the scales detects it without another instruction.
  barrier_wait(block.full, phase & 1);
  scales.load(factors, 0, round, true);
  for (;; left -= STAGES, phase = ~phase, round = other_round(round)) {
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
      int next = (s + 1) % STAGES;
      products(s, 0);
      if (!all_of_warpgroup(block.wg, factors.multiply(one_half ? 0.0f : LARGEST))) {
        odd = s;
        goto special_values;
      }
      mma_wait<0>();
      add_up<0, true>(acc, part, factors);
      products(s, 1);
      if (left > s + 1) barrier_wait(block.full + 8 * next, (next ? phase : ~phase) >> next & 1);
      mma_wait<0>();
      release(freed + 8 * s, share);
      scales.load(factors, next, next ? round : other_round(round), left > s + 1);
      add_up<PARTIAL_SUMS, true>(acc, part, factors);
      if (left <= s + 1) return;
    }
  }
special_values:
  // The rest of the tile, or a tile of one half. The MMAs of the first half of stage `odd` are in flight.
  left -= odd;
  for (bool narrow = HALVES && uniform(one_half);;) {
    mma_wait<0>();
    add_up<0, false>(acc, part, factors);
    if (!narrow) {
      products(odd, 1);
      mma_wait<0>();
      add_up<PARTIAL_SUMS, false>(acc, part, factors);
    }
    release(freed + 8 * odd, share);
    if (--left == 0) return;
    if (++odd == STAGES) odd = 0, phase = ~phase, round = other_round(round);
    barrier_wait(block.full + 8 * odd, phase >> odd & 1);
    scales.load(factors, odd, round, true);
    products(odd, 0);
    factors.multiply(LARGEST);
  }
}

#endif  // tiles of 128 rows

#else  // many rows of bf16

// acc = a * b^T over K. `freed` is the barrier of the first stage that says that a stage is free, at which this warp
// arrives for `share` warps.
__device__ __forceinline__ void sum_products(float (&acc)[SUMS], const Block& block, u32 a, u32 b, u32 phase, u32 freed,
                                             int share, int k_blocks, bool one_half) {
  int stage = 0, before = 0;
  bool narrow = HALVES && uniform(one_half);
  for (int kb = 0; kb < k_blocks; ++kb) {
    u32 at = stage * STAGE_STEP;
    barrier_wait(block.full + 8 * stage, phase >> stage & 1);
    keep(acc);
    mma_fence();
    if (narrow) {
#pragma unroll
      for (int k = 0; k < 4; ++k) mma_bf16_half(acc, a + at + 2 * k, b + at + 2 * k, kb > 0 || k > 0);
      mma_commit();  // in both branches: after their join, the compiler would insert an empty MMA
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) mma_bf16(acc, a + at + 2 * k, b + at + 2 * k, kb > 0 || k > 0);
      mma_commit();
    }
    mma_wait<1>();
    if (kb > 0) release(freed + 8 * before, share);
    before = stage;
    if (++stage == STAGES) stage = 0, phase = ~phase;
  }
  mma_wait<0>();
  keep(acc);
  release(freed + 8 * before, share);
}

#endif

#if ROWS < 128

// Multiplies and stores all tiles that are announced. Called by the warpgroup.
__device__ __forceinline__ void multiply_tiles(const Block& block, RingPhases phases, int k_blocks,
                                               const Results& results) {
  int warp = block.warp, lane = threadIdx.x % 32;
  float acc[SUMS];
  for (int number = 0;; ++number) {
    barrier_wait(block.known + 8 * (number % TILES_AHEAD), number / TILES_AHEAD & 1);
    int4 what = block.tiles[number % TILES_AHEAD];
    if (what.y == NO_MORE) break;
    Tile tile;
    tile.start = what.x, tile.rows = what.y, tile.expert = what.z, tile.column = what.w & ~ONE_HALF;
    u32 a = uniform(descriptor(block.ring)), b = descriptor(block.ring + A_BYTES);
    sum_products(acc, block, a, b, phases.of_next_tile(), block.empty, k_blocks);
    Maxima of_pair = {};
    if (PAIRED) {
      u32 place = number % 2 * MATH_WARPS + warp;
      of_pair.here = block.maxima + place * (32 / ROW_THREADS) + lane / ROW_THREADS;
      of_pair.there = address_at(shared_address(of_pair.here), block.rank ^ 1);
      of_pair.arrived = shared_address(block.told + place);
      of_pair.arrived_there = address_at(of_pair.arrived, block.rank ^ 1);
      of_pair.parity = number / 2 & 1;
    }
    share_sums(acc, (float*)block.staging);
    // The first block of a cluster stores the scales of both.
    store_few((float*)block.staging, *results.extras, tile, results.capacity - 1, results.columns, results.alpha,
              results.gate_limit, results.up_limit, results.up_offset, results.out, results.stride,
              block.rank > 0 ? nullptr : results.scales, of_pair);
  }
}

#else

#if ROWS > 128

// Stores a tile. The warp's rows of the first half begin at `row_of_warp` of the tile; of the second half there are
// none if `one_half`. `of_pair` is where block scales of a gated result are shared with the other block of the cluster,
// and `scales` null where that one stores them.
__device__ __forceinline__ void store_tall(float (&acc)[SUMS], u8* staging, const Tile& tile, int row_of_warp,
                                           bool one_half, const Results& results, float* scales,
                                           const Maxima& of_pair) {
  constexpr int SIZE = OUT == 3 ? 1 : (OUT == 2 ? 4 : 2), PART = 64 / (GATED ? 2 : 1);
  int columns = results.columns, lane = threadIdx.x % 32;
  // A cluster may reach past the last column; that is not stored.
  int width = min(columns - tile.column, TILE_COLUMNS);
  long long stride = results.stride * SIZE;
  u32 bits[4] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (h > 0 && one_half) continue;
    if (EXTRAS) {
      int row = tile.start + row_of_warp + 128 * h + lane / 4, last_row = results.capacity - 1;
      if (h == 0) apply_extras<0, 64, PART>(acc, *results.extras, row, last_row, tile.expert, tile.column, columns);
      else apply_extras<64, 64, PART>(acc, *results.extras, row, last_row, tile.expert, tile.column, columns);
    }
#pragma unroll
    for (int i = 64 * h; i < 64 * h + PART && GATED; ++i) {
      acc[i] = activated(acc[i], acc[(i + PART) % SUMS], results.alpha, results.gate_limit, results.up_limit,
                         results.up_offset);
      if (!SHORT_BLOCKS || (i - 64 * h) / 4 * 8 < width)
        bits[2 * h + i / 2 % 2] = max(bits[2 * h + i / 2 % 2], __float_as_uint(acc[i]) & 0x7FFFFFFF);
    }
#pragma unroll
    for (int i = 64 * h; i < 64 * h + 64 && ACTIVATED && !GATED; ++i) acc[i] = function_of(acc[i], results.alpha);
  }
  if (OUT == 3 && GATED) {
#pragma unroll
    for (int i = 0; i < 4; ++i) bits[i] = max_of_row(bits[i]);
    largest_of_pair(of_pair, bits, one_half ? 2 : 4);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (h > 0 && one_half) continue;
    int rows = width > 0 ? tile.rows - row_of_warp - 128 * h : 0;
    long long position = tile.start + row_of_warp + 128 * h;
    u8* to = results.out + position * stride + (long long)tile.column * SIZE;
    if (OUT == 3) {
      int scale_columns = blocks_of(columns);
      float* of_rows = scales ? scales + position * scale_columns + tile.column / 128 : nullptr;
      if (GATED && h == 0) store_quantized_64<0>(acc, bits, staging, to, stride, rows, width, of_rows, scale_columns);
      if (GATED && h > 0) store_quantized_64<64>(acc, bits, staging, to, stride, rows, width, of_rows, scale_columns);
      if (!GATED && h == 0) store_quantized<0>(acc, staging, to, stride, rows, width, of_rows, scale_columns);
      if (!GATED && h > 0) store_quantized<64>(acc, staging, to, stride, rows, width, of_rows, scale_columns);
    } else if (h == 0) {
      store<TILE_COLUMNS>(acc, staging, to, stride, rows, width);
    } else {
      store<TILE_COLUMNS, 64>(acc, staging, to, stride, rows, width);
    }
  }
}

#else  // tiles of 128 rows

// Stores a tile. The warp's rows begin at `row_of_warp` of the tile.
__device__ __forceinline__ void store_tile(float (&acc)[SUMS], u8* staging, const Tile& tile, int row_of_warp,
                                           bool one_half, const Results& results) {
  int columns = results.columns, lane = threadIdx.x % 32;
  if (EXTRAS) {
    int row = tile.start + row_of_warp + lane / 4;
    apply_extras(acc, *results.extras, row, results.capacity - 1, tile.expert, tile.column, columns);
  }
  constexpr int SIZE = OUT == 3 ? 1 : (OUT == 2 ? 4 : 2);
  // For an odd row tile, a cluster may reach past the last column tile; that is not stored.
  int width = min(columns - tile.column, one_half ? HALF : TILE_COLUMNS);
  int rows = width > 0 ? tile.rows - row_of_warp : 0;
  long long position = tile.start + row_of_warp;
  long long stride = results.stride * SIZE;
  u8* to = results.out + position * stride + (long long)tile.column * SIZE;
  if (GATED) {
#pragma unroll
    for (int i = 0; i < 64; ++i)
      acc[i] = activated(acc[i], acc[64 + i], results.alpha, results.gate_limit, results.up_limit, results.up_offset);
  } else if (ACTIVATED) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) acc[i] = function_of(acc[i], results.alpha);
  }
  if (OUT == 3) {
    int scale_columns = blocks_of(columns);
    float* scales = results.scales + position * scale_columns + tile.column / 128;
    store_quantized<0>(acc, staging, to, stride, rows, width, scales, scale_columns);
    if (!GATED && width > HALF) {
      width -= HALF;
      store_quantized<64>(acc, staging, to + HALF, stride, rows, width, scales + 1, scale_columns);
    }
  } else {
    store<TILE_COLUMNS>(acc, staging, to, stride, rows, width);
  }
}

#endif  // tiles of 128 rows

// Multiplies and stores all tiles that are announced. Called by both warpgroups. They take turns at tiles of at most 64
// rows, and multiply the halves of others. With TALL they take turns at each 64 rows of a tile, too, so that two halves
// of 64 rows that a warpgroup multiplies lie 128 apart.
__device__ __forceinline__ void multiply_tiles(const Block& block, RingPhases phases, int k_blocks,
                                               const Results& results) {
  int wg = block.wg, warp = block.warp, lane = threadIdx.x % 32;
  float acc[SUMS];
  // Position of the scales of the next round of stages, and whether a tile swaps the two positions.
  [[maybe_unused]] u32 round = 0;
  bool turned = TMA_SCALES && k_blocks / STAGES % 2;
  int turn = 0;  // the warpgroup that gets the next tile of at most 64 rows
  bool waits = false;
  [[maybe_unused]] int stored = 0;  // tiles, by this warpgroup
  u8* staging = block.staging + warp * WARP_STAGING;
  u32 freed = TEAM > 1 && ARRIVALS_OF_WARP == 1 ? address_at(block.empty, lane % TEAM) : block.empty;
  for (int number = 0;; ++number) {
    barrier_wait(block.known + 8 * (number % TILES_AHEAD), number / TILES_AHEAD & 1);
    int4 what = block.tiles[number % TILES_AHEAD];
    if (what.y == NO_MORE) break;
    bool one_half = HALVES && what.w & ONE_HALF;
    Tile tile;
    tile.start = what.x, tile.rows = what.y, tile.expert = what.z, tile.column = what.w & ~ONE_HALF;
    bool alone = tile.rows <= 64;
    if (alone) {
      turn ^= 1;
      if (turn == wg) {
        // The tile of the other warpgroup.
        phases.of_next_tile();
        round = turned ? other_round(round) : round;
        waits = true;
        continue;
      }
    }
    int share = alone ? 2 : 1, first_row = uniform(alone ? 0 : wg * 64), row_of_warp = first_row + warp % 4 * 16;
    u32 a = uniform(descriptor(block.ring + first_row * 128)), b = descriptor(block.ring + A_BYTES);
    u32 phase = phases.of_next_tile();
    if (TALL) one_half = tile.rows <= first_row + 128;
#if FP8
#pragma unroll
    for (int i = 0; i < SUMS; ++i) acc[i] = 0.0f;
    if (waits) wait_turn(wg), waits = false;
    ScaleAddresses scales(block, row_of_warp + lane / 4);
    u32 of_tile = round;
    round = turned ? other_round(round) : round;
    add_products(acc, block, scales, a, b, phase, freed, share, k_blocks, one_half, of_tile);
#else
    if (waits) wait_turn(wg), waits = false;
    sum_products(acc, block, a, b, phase, freed, share, k_blocks, one_half);
#endif
    if (alone) give_turn(wg);
#if ROWS > 128
    u32 place = stored % 2 * MATH_WARPS + warp;
    Maxima of_pair;
    of_pair.here = block.maxima + place * 32 + lane / 4;
    of_pair.there = address_at(shared_address(of_pair.here), block.rank ^ 1);
    of_pair.arrived = shared_address(block.told + place);
    of_pair.arrived_there = address_at(of_pair.arrived, block.rank ^ 1);
    of_pair.parity = stored++ / 2 & 1;
    // The first block of a cluster stores the scales of both, if they share them.
    float* scales_of_rows = GATED && block.rank > 0 ? nullptr : results.scales;
    store_tall(acc, staging, tile, row_of_warp, one_half, results, scales_of_rows, of_pair);
#else
    store_tile(acc, staging, tile, row_of_warp, one_half, results);
#endif
  }
  if (waits) wait_turn(wg);
}

#endif

#endif
