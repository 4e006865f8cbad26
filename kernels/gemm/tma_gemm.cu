// Grouped GEMM for Hopper that feeds operands to the tensor cores as they are stored. One warpgroup of producers fills a
// ring in shared memory by TMA (gathered rows one by one); two warpgroups multiply by wgmma.
//
// A tile is 128 rows times two halves of 128 weight rows: 256 columns of a result, or gate and up of the same 128 columns
// of a gated one. Each math warpgroup multiplies 64 of the rows. Tiles of at most 64 rows alternate between the two
// warpgroups: one multiplies while the other stores. With CLUSTER 2, the two blocks of a cluster work on two row tiles of
// the same columns and share the weights. For the odd row tile of a group they work on two column tiles and share the rows.
// If the last round of plain tiles has work for at most half of the clusters, its tiles are halved along the columns.
//
// FEW, for a few rows of each group, has tiles of ROWS 8, 16 or 32 times 128 weight rows, which are gate and up of 64 columns of
// a gated result. One warpgroup multiplies, and an SM has two blocks. In a cluster of two, which a gated result with block
// scales needs, the blocks work on both halves of 128 columns and tell each other the largest values of a row. Here the
// weights are the operand of 64 rows, twice, and the rows that of 8, 16 or 32 columns: each sum is of the same products in the same
// order, and has the same bits.
//
// Macros: ROWS (of a tile), FP8 (1: e4m3 with fp32 scales of 1x128 and 128x128; 0: bf16), STAGES, CLUSTER 1 or 2, GATHER
// (rows through row_index), ACTIVATED (the result is activated), GATED (and the weights are gate and up), FUNCTION
// (`ActivationFunction.code`), GATE_SOFTCAP and UP_SOFTCAP (of `Activation`; none if not defined), ORDER
// (`GateUpOrder.code`, 0 for none), OUT (0 bf16, 1 fp16, 2 fp32, 3 e4m3 with 1x128 scales), EXTRAS (row scale, expert scales
// or bias exist), A_BOX (rows of a box of the rows' tensor map), TMA_SCALES (TMA copies the scales too, so that one thread
// produces contiguous rows; needs FP8, 4 stages, scales of a row a multiple of 4), SHORT_BLOCKS (the columns of an activated
// result end within a block of 128, and so do gate and up unless interleaved), EXPAND (of tma_expand.cuh).
// The last stage of K may be short too: past its end TMA writes zeros, which add nothing.
//
// Sizes are in tma_sizes.cuh, copies in tma_loads.cuh, the order of tiles in tma_tiles.cuh, products in tma_products.cuh,
// what is stored in tma_epilogue.cuh; here is the ring between those who load and those who multiply.

#include "tma_loads.cuh"
#include "tma_tiles.cuh"
#include "tma_products.cuh"
#include "tma_epilogue.cuh"
#include "tma_expand.cuh"

extern __shared__ __align__(1024) u8 shared[];

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(128 * (MATH_WGS + 1), FEW ? 2 : 1)
tma_gemm(const __grid_constant__ TensorMap a_map,
#if EXPAND
         const u8* w_units,
#else
         const __grid_constant__ TensorMap w_map,
#endif
         const __grid_constant__ TensorMap scales_map, const int* row_index, const float* a_scales, const float* w_scales,
         Extras extras, u8* out, long long out_stride, float* out_scales,
         const int* offsets, const int* expert_ids, const int* num_active, int num_groups, int num_experts,
         int capacity, int columns, int k_blocks, int band_width, int settled, float alpha, float gate_limit,
         float up_limit, float up_offset, const void* topk_idx, int num_ids, int id_bytes, int loads_after_ns) {
    u8* staging = shared + STAGES * STAGE_BYTES + PACKED * PACKED_BYTES;
    float* scales = (float*)(staging + STAGING_BYTES + TABLE_BYTES);
    u64* barriers = (u64*)((u8*)scales + STAGES * SCALE_BYTES);
    // Tiles that the producers announce to the math warps: start, rows, expert, column.
    int4* tiles = (int4*)(barriers + 2 * (STAGES + PACKED) + TILES_AHEAD + TURN_BARRIERS);
    Group* groups = (Group*)(tiles + TILES_AHEAD);
    int* numbers = (int*)(groups + num_groups + 1);  // of the rows of the tile that is being loaded, if they are gathered
    u64* told = (u64*)(numbers + NUMBERS);  // barriers of the other block's maxima, of each warp for two tiles
    u32* maxima = (u32*)(told + 2 * MATH_WARPS);
    int2* totals = (int2*)staging;  // of the groups of each warp
    u32 full = shared_address(barriers), empty = full + 8 * STAGES, known = empty + 8 * STAGES, ended = known + 8 * TILES_AHEAD;
    u32 packed = ended + 8 * TURN_BARRIERS;
    u32 ring = shared_address(shared);
    int wg = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    int tiles_n = ceil_div(columns, ITEM_COLUMNS), step = gridDim.x / CLUSTER;  // between work items of a cluster
    u32 rank = cluster_rank();

    if (threadIdx.x == 32) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1 + OF_COPIES + OF_ROWS + OF_EXPANSION);
            barrier_init(empty + 8 * s, MATH_WARPS * TEAM * ARRIVALS_OF_WARP);
        }
        for (int i = 0; i < TILES_AHEAD; ++i) barrier_init(known + 8 * i, 1);
        if (FEW) barrier_init(ended, 1);
        for (int s = 0; s < PACKED; ++s) {
            barrier_init(packed + 8 * s, 1);
            barrier_init(packed + 8 * (PACKED + s), 4 * ARRIVALS_OF_WARP);
        }
        for (int i = 0; i < 2 * MATH_WARPS && PAIRED; ++i) barrier_init(shared_address(told) + 8 * i, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    enter_cluster();
    if (threadIdx.x == 64) {
#if !EXPAND
        asm volatile("prefetch.tensormap [%0];" ::"l"(&w_map) : "memory");
#endif
        asm volatile("prefetch.tensormap [%0];" ::"l"(&a_map) : "memory");
    }
#if EXPAND
    uint2* table = (uint2*)(staging + STAGING_BYTES);
    fill_table(table);
#endif
    // This kernel may have started before the one that writes its rows has ended. If `settled`, that one has not written
    // the table of groups, which then can be read, and the weights of the first tile loaded, before it ends. So they can if
    // there are `ids`, which nobody has written since before it began. Weights are loaded `loads_after_ns` later, unless the one
    // before has ended by then: earlier loads would delay those of that one.
    const RoutedIds ids = {FEW ? topk_idx : nullptr, num_ids, id_bytes};
    auto wait_for_rows = [] { asm volatile("griddepcontrol.wait;" ::: "memory"); };
    if (!FEW || !(settled || ids.given())) wait_for_rows();
    // The next kernel is the product that reads these results, or, behind that, the one that combines the rows. That product
    // takes for granted that the groups are known, and so does that combine of the routing of its tokens.
    auto start_next = [] { asm volatile("griddepcontrol.launch_dependents;"); };
    if ((ACTIVATED || FEW) && !ids.given()) start_next();
    count_tiles(groups, totals, offsets, ids, expert_ids, num_active, num_groups, num_experts, capacity, tiles_n);
    await_cluster();

    // A tile starts at the first stage and goes round the ring until K is done. Bit s of `phases`: whether all previous tiles
    // used stage s an odd number of times. Bit s of `used`: whether one tile does.
    int g = 0;
    u32 phases = 0, used = 0;
    for (int s = 0; s < STAGES; ++s) used |= (u32)((k_blocks - s + STAGES - 1) / STAGES & 1) << s;
    Tile tile;
    if (wg == MATH_WGS) {
        if (!FEW) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        // One thread starts the copies by TMA, but for gathered rows: a thread of each warp starts those of its rows. All threads
        // copy scales that TMA does not copy.
        int thread = threadIdx.x % 128, first_own = warp % 4 * 32;
        bool leader = thread == 0;
        int announced = 0;
        // An announcement overwrites the one of TILES_AHEAD tiles ago. That is safe: a warp that had not read it would still
        // hold the stages of the later tiles.
        auto announce = [&](int4 what) {
            if (leader) {
                tiles[announced % TILES_AHEAD] = what;
                barrier_arrive(known + 8 * (announced % TILES_AHEAD));
            }
            ++announced;
        };
        u32 round = 0;
        // This thread handles the tiles below `last`. If one thread copies, its whole warp loops, so that values stay
        // warp-uniform.
        int last = warp - MATH_WARPS < PRODUCING_WARPS ? 0x7FFFFFFF : 0;
        // The first stages of the first tile, whose weights wait neither for row numbers nor, if `settled`, for the kernel
        // before this one.
        int ahead = 0;
        bool begins = FEW;
        // From `whole` on, tiles are halved.
        int total = groups[num_groups].first, rest = total % step;
        int whole = HALVES && 2 * rest <= step ? total - rest : total;
        auto find = [&](int t, int& g, Tile& tile, int& halves) {
            int halved = max(t - whole, 0);
            halves = HALVES && t >= whole ? 1 : BOXES;
            if (!find_tile(groups, num_groups, t - ceil_div(halved, 2), tiles_n, band_width, rank, g, tile)) return false;
            tile.column += halved % 2 * HALF;
            return true;
        };
#if EXPAND
        Expander expander(
            Weights(w_units, columns, k_blocks, table), ring + STAGES * STAGE_BYTES, packed, blockIdx.x / CLUSTER, step);
#endif
        for (int t = blockIdx.x / CLUSTER; t < last; t += step) {
            int halves;
            if (!find(t, g, tile, halves)) break;
            bool shared_rows = TEAM > 1 && !tile.pair_rows, shared_weights = TEAM > 1 && tile.pair_rows;
            int boxes = GATHER ? 0 : min(BM / A_BOX, ceil_div(tile.rows, A_BOX)), box_bytes = boxes * A_BOX * 128;
            int gathered = GATHER ? min(BM, tile.rows) : 0, own = max(0, min(32, gathered - first_own));
            if (FEW) box_bytes += gathered * 128;
            // Each warp has those of the rows that it loads.
            int row_of_lane = 0;
            auto load_row_numbers = [&] {
                if (GATHER && lane < own) row_of_lane = row_index[tile.start + first_own + lane];
                if (NUMBERS > 0) {
                    __syncwarp();  // those of the last tile have been used
                    numbers[first_own + lane] = row_of_lane;
                    __syncwarp();
                }
            };
            bool numbers_wait = begins && ids.given();
            if (!numbers_wait) load_row_numbers();
            auto load_weights = [&](u32 b, u32 ready, int kb) {
#if !EXPAND
                for (int h = shared_weights ? rank : 0; h < halves; h += shared_weights ? TEAM : 1)
                    load_half(&w_map, b + h * BOX_BYTES, ready, kb * BK, tile.column, h, tile.expert, shared_weights);
#endif
            };
#if EXPAND
            expander.begin(tile, halves);
#endif
            if (begins) {
                if (leader && loads_after_ns > 0) barrier_wait_for(ended, 0, loads_after_ns);
                ahead = EXPAND ? 0 : min(ids.given() ? EARLY_STAGES : STAGES, k_blocks);
                for (int s = 0; s < ahead && leader; ++s) {
                    barrier_expect(full + 8 * s, box_bytes + halves * TMA_BOX_BYTES);
                    load_weights(ring + s * STAGE_BYTES + A_BYTES, full + 8 * s, s);
                }
#if EXPAND
                expander.load(ids.given() ? EARLY_STAGES : PACKED, find);
#endif
                wait_for_rows();
                if (numbers_wait) load_row_numbers();
                begins = false;
            }
            announce(make_int4(tile.start, tile.rows, tile.expert, tile.column | (halves == 1 ? ONE_HALF : 0)));
            const float* a_scale = a_scales + (long long)(tile.start + min(thread, tile.rows - 1)) * k_blocks;
            const float* w_scale = w_scales + weight_scales(tile.expert, tile.column, columns, thread) * k_blocks;
            const float* of_second = w_scales + weight_scales(tile.expert, tile.column, columns, 1) * k_blocks;
            int stage = 0;
            u32 phase = phases;
            phases ^= used;
            for (int kb = 0; kb < k_blocks; ++kb) {
                u32 a = ring + stage * STAGE_BYTES, b = a + A_BYTES, ready = full + 8 * stage;
#if EXPAND
                expander.load(PACKED, find);
#endif
                barrier_wait(empty + 8 * stage, ~phase >> stage & 1);
                __syncwarp();  // a late lane would wait for the following round
                if (leader) {
                    bool scales_too = TMA_SCALES && stage == 0;
                    if (!FEW || ahead <= 0)
                        barrier_expect(ready, box_bytes + halves * TMA_BOX_BYTES + (scales_too ? (BM + 2) * 16 : 0));
                    for (int i = shared_rows ? rank : 0; i < boxes; i += shared_rows ? TEAM : 1)
                        load_rows(&a_map, a + i * A_BOX * 128, ready, kb * BK, tile.start + i * A_BOX, shared_rows);
                    if (!FEW || ahead <= 0) load_weights(b, ready, kb);
                    if (scales_too) {
                        u32 scale = shared_address(scales) + round;
                        load_rows(&scales_map, scale, ready, kb, tile.start, false);
                        bulk_load(scale + BM * 16, w_scale + kb, 16, ready);
                        bulk_load(scale + BM * 16 + 16, of_second + kb, 16, ready);
                        round = ROUND_BYTES - round;
                    }
                }
                --ahead;
                auto load_row = [&](int i, int n) { load_rows(&a_map, a + i * 128, ready, kb * BK, n, false); };
                if (FEW && GATHER && lane < own) load_row(lane, row_of_lane);
                if (OF_ROWS > 0 && elected()) {
                    int i = first_own, end = first_own + own;
                    barrier_expect(ready, own * 128);
#pragma unroll 1
                    for (; i + 8 <= end; i += 8) {
                        int4 n = *(const int4*)(numbers + i), m = *(const int4*)(numbers + i + 4);
                        load_row(i, n.x), load_row(i + 1, n.y), load_row(i + 2, n.z), load_row(i + 3, n.w);
                        load_row(i + 4, m.x), load_row(i + 5, m.y), load_row(i + 6, m.z), load_row(i + 7, m.w);
                    }
#pragma unroll 1
                    for (; i < end; ++i) load_row(i, numbers[i]);
                }
#if EXPAND
                expander.expand(b, ready, k_blocks - 1 - kb);  // before copies by threads, for which its fence would wait
#endif
                if (THREADS_COPY) {
                    u32 scale = shared_address(scales) + stage * SCALE_BYTES;
                    if (thread < BM) copy_word(scale + thread * 4, a_scale + kb);
                    if (thread < 2) copy_word(scale + BM * 4 + thread * 4, w_scale + kb);
                    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(ready) : "memory");
                }
                if (++stage == STAGES) stage = 0, phase = ~phase;
            }
        }
        if (begins) wait_for_rows();  // the next kernel takes the end of this one for the end of the one before, too
        announce(make_int4(0, NO_MORE, 0, 0));
    } else {
        if (!FEW) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MATH_REGISTERS));
        if (FEW) wait_for_rows();
        if (FEW && threadIdx.x == 0) barrier_arrive(ended);
        if (ids.given()) start_next();
        float acc[SUMS];
        // Position of the scales of the next round of stages, and whether a tile swaps the two positions.
        u32 round = 0;
        bool turned = TMA_SCALES && k_blocks / STAGES % 2;
        auto other = [](u32 of_round) { return TMA_SCALES ? ROUND_BYTES - of_round : 0; };
        int turn = 0;  // the warpgroup that gets the next tile of at most 64 rows
        bool waits = false;
        u8* warp_staging = staging + warp * WARP_STAGING;
        u32 freed = TEAM > 1 && ARRIVALS_OF_WARP == 1 ? address_at(empty, lane % TEAM) : empty;
        for (int number = 0;; ++number) {
            barrier_wait(known + 8 * (number % TILES_AHEAD), number / TILES_AHEAD & 1);
            int4 what = tiles[number % TILES_AHEAD];
            if (what.y == NO_MORE) break;
            bool one_half = HALVES && what.w & ONE_HALF;
            tile.start = what.x, tile.rows = what.y, tile.expert = what.z, tile.column = what.w & ~ONE_HALF;
            bool alone = !FEW && tile.rows <= 64;
            int share = alone ? 2 : 1;
            if (alone) {
                turn ^= 1;
                if (turn == wg) {
                    // The tile of the other warpgroup.
                    phases ^= used;
                    round = turned ? other(round) : round;
                    waits = true;
                    continue;
                }
            }
            int first_row = uniform(alone ? 0 : wg * 64), row_of_warp = first_row + warp % 4 * 16;
            int row = tile.start + row_of_warp + lane / 4;
            u32 a = uniform(descriptor(ring + first_row * 128)), b = descriptor(ring + A_BYTES), phase = phases;
            phases ^= used;
            constexpr u32 STEP = STAGE_BYTES >> 4, SECOND = HALF_BYTES >> 4;  // in descriptors
#if ROWS < 128
            int stage = 0;
#if FP8
#pragma unroll
            for (int i = 0; i < SUMS; ++i) acc[i] = 0.0f;
            float part[PARTIAL_SUMS];
            for (int kb = 0; kb < k_blocks; ++kb) {
                barrier_wait(full + 8 * stage, phase >> stage & 1);
                multiply(part, b + stage * STEP, a + stage * STEP, false);
                add_up(acc, part, scales + stage * (SCALE_BYTES / 4));
                release(freed + 8 * stage, 1);
                if (++stage == STAGES) stage = 0, phase = ~phase;
            }
#else
            int before = 0;
            for (int kb = 0; kb < k_blocks; ++kb) {
                barrier_wait(full + 8 * stage, phase >> stage & 1);
                multiply(acc, b + stage * STEP, a + stage * STEP, kb > 0);
                mma_wait<1>();
                if (kb > 0) release(freed + 8 * before, 1);
                before = stage;
                if (++stage == STAGES) stage = 0, phase = ~phase;
            }
            mma_wait<0>();
            keep(acc);
            release(freed + 8 * before, 1);
#endif
#elif FP8
#pragma unroll
            for (int i = 0; i < SUMS; ++i) acc[i] = 0.0f;
            if (waits) wait_turn(wg), waits = false;
            Factors factors;
            float part[PARTIAL_SUMS];
            int left = k_blocks, odd = 0;
            // Zero, hidden from the compiler, which would move loads from uniform addresses to uniform registers.
            u32 zero;
            asm("{\n.reg .u32 t;\nmov.u32 t, %%laneid;\nshr.u32 %0, t, 5;\n}" : "=r"(zero));
            // Bytes between rows, between the halves, and between stages.
            constexpr u32 OF_ROW = TMA_SCALES ? 16 : 4, OF_STAGE = TMA_SCALES ? 4 : SCALE_BYTES;
            u32 row_scales = shared_address(scales) + (row_of_warp + lane / 4) * OF_ROW;
            u32 half_scales = shared_address(scales) + BM * OF_ROW + zero, of_round = round;
            round = turned ? other(round) : round;
            auto load_scales = [&](int s, u32 of_round, bool now) {
                u32 at = of_round + s * OF_STAGE;
                load_word(factors.a[0], row_scales + at, now);
                load_word(factors.a[1], row_scales + at + 8 * OF_ROW, now);
                load_word(factors.w[0], half_scales + at, now);
                load_word(factors.w[1], half_scales + at + OF_ROW, now);
            };
            auto products = [&](int s, int half) {
                multiply(part, a + s * STEP, b + s * STEP + half * SECOND);
            };
            // Unrolled over the stages, so that their addresses are constants: work outside the tensor cores leaves them idle
            // whenever both warpgroups do such work. The wait for the next stage overlaps with the products of this one, and
            // the next scales are read between the last multiply-adds.
            // A tile of one half uses the slow path, too; the test of the scales detects it without another instruction.
            barrier_wait(full, phase & 1);
            load_scales(0, of_round, true);
            for (;; left -= STAGES, phase = ~phase, of_round = other(of_round)) {
#pragma unroll
                for (int s = 0; s < STAGES; ++s) {
                    int next = (s + 1) % STAGES;
                    products(s, 0);
                    if (!all_of_warpgroup(wg, factors.multiply(one_half ? 0.0f : LARGEST))) {
                        odd = s;
                        goto special_values;
                    }
                    mma_wait<0>();
                    add_up<0, true>(acc, part, factors);
                    products(s, 1);
                    if (left > s + 1) barrier_wait(full + 8 * next, (next ? phase : ~phase) >> next & 1);
                    mma_wait<0>();
                    release(freed + 8 * s, share);
                    load_scales(next, next ? of_round : other(of_round), left > s + 1);
                    add_up<PARTIAL_SUMS, true>(acc, part, factors);
                    if (left <= s + 1) goto added;
                }
            }
        special_values:
            // The rest of the tile, or a tile of one half. The products of the first half of stage `odd` are in flight.
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
                if (--left == 0) break;
                if (++odd == STAGES) odd = 0, phase = ~phase, of_round = other(of_round);
                barrier_wait(full + 8 * odd, phase >> odd & 1);
                load_scales(odd, of_round, true);
                products(odd, 0);
                factors.multiply(LARGEST);
            }
        added:
#else
            int stage = 0, before = 0;
            if (waits) wait_turn(wg), waits = false;
            bool narrow = HALVES && uniform(one_half);
            for (int kb = 0; kb < k_blocks; ++kb) {
                u32 at = stage * STEP;
                barrier_wait(full + 8 * stage, phase >> stage & 1);
                keep(acc);
                mma_fence();
                if (narrow) {
#pragma unroll
                    for (int k = 0; k < 4; ++k) mma_bf16_half(acc, a + at + 2 * k, b + at + 2 * k, kb > 0 || k > 0);
                    mma_commit();  // in both branches: after their join, the compiler would insert an empty product
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
#endif
#if ROWS < 128
            Maxima of_pair = {};
            if (PAIRED) {
                u32 place = number % 2 * MATH_WARPS + warp;
                of_pair.here = maxima + place * (32 / ROW_THREADS) + lane / ROW_THREADS;
                of_pair.there = address_at(shared_address(of_pair.here), rank ^ 1);
                of_pair.arrived = shared_address(told + place);
                of_pair.arrived_there = address_at(of_pair.arrived, rank ^ 1);
                of_pair.parity = number / 2 & 1;
            }
            share_sums(acc, (float*)staging);
            // The first block of a cluster stores the scales of both.
            store_few((float*)staging, extras, tile, capacity - 1, columns, alpha, gate_limit, up_limit, up_offset, out,
                      out_stride, rank > 0 ? nullptr : out_scales, of_pair);
#else
            if (alone) give_turn(wg);
            if (EXTRAS) apply_extras(acc, extras, row, capacity - 1, tile.expert, tile.column, columns);
            constexpr int SIZE = OUT == 3 ? 1 : (OUT == 2 ? 4 : 2);
            // For an odd row tile, a cluster may reach past the last column tile; that is not stored.
            int width = min(columns - tile.column, one_half ? HALF : TILE_COLUMNS);
            int rows = width > 0 ? tile.rows - row_of_warp : 0;
            long long position = tile.start + row_of_warp;
            long long stride = out_stride * SIZE;
            u8* to = out + position * stride + (long long)tile.column * SIZE;
            if (GATED) {
#pragma unroll
                for (int i = 0; i < 64; ++i)
                    acc[i] = activated(acc[i], acc[64 + i], alpha, gate_limit, up_limit, up_offset);
            } else if (ACTIVATED) {
#pragma unroll
                for (int i = 0; i < SUMS; ++i) acc[i] = function_of(acc[i], alpha);
            }
            if (OUT == 3) {
                int scale_columns = blocks_of(columns);
                float* scales = out_scales + position * scale_columns + tile.column / 128;
                store_quantized<0>(acc, warp_staging, to, stride, rows, width, scales, scale_columns);
                if (!GATED && width > HALF) {
                    width -= HALF;
                    store_quantized<64>(acc, warp_staging, to + HALF, stride, rows, width, scales + 1, scale_columns);
                }
            } else {
                store<TILE_COLUMNS>(acc, warp_staging, to, stride, rows, width);
            }
#endif
        }
        if (waits) wait_turn(wg);
    }
    __syncwarp();
    leave_cluster();
}
