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

// Where a thread finds the scales of its two rows and of both halves of the weights.
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

  // Loads those of a stage, if `now`.
  __device__ __forceinline__ void load(Factors& factors, int stage, u32 of_round, bool now) const {
    u32 at = of_round + stage * OF_STAGE;
    load_word(factors.a[0], rows + at, now);
    load_word(factors.a[1], rows + at + 8 * OF_ROW, now);
    load_word(factors.w[0], halves + at, now);
    load_word(factors.w[1], halves + at + OF_ROW, now);
  }
};

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

// Multiplies and stores all tiles that are announced. Called by both warpgroups. They take turns at tiles of at most 64
// rows, and multiply the halves of others.
__device__ __forceinline__ void multiply_tiles(const Block& block, RingPhases phases, int k_blocks,
                                               const Results& results) {
  int wg = block.wg, warp = block.warp, lane = threadIdx.x % 32;
  float acc[SUMS];
  // Position of the scales of the next round of stages, and whether a tile swaps the two positions.
  [[maybe_unused]] u32 round = 0;
  bool turned = TMA_SCALES && k_blocks / STAGES % 2;
  int turn = 0;  // the warpgroup that gets the next tile of at most 64 rows
  bool waits = false;
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
    store_tile(acc, staging, tile, row_of_warp, one_half, results);
  }
  if (waits) wait_turn(wg);
}

#endif

#endif
