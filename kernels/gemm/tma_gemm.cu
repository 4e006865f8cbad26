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
// result end within a block of 128, and so do gate and up unless interleaved).
// The last stage of K may be short too: past its end TMA writes zeros, which add nothing.

#include "activation.cuh"
#include "mbarrier.cuh"
#include "routed_ids.cuh"

struct alignas(64) TensorMap {
    u64 words[16];
};

// A group in shared memory: number of its first tile, first row position, rows, expert.
struct Group {
    int first, start, rows, expert;
};

struct Tile {
    int start, rows, expert, column;  // first row position, rows from there to the end of the group, first column
    bool pair_rows;                   // the blocks of the cluster share the weights (else the rows)
};

constexpr int BM = ROWS;
constexpr bool FEW = BM < 128;
constexpr int MATH_WGS = FEW ? 1 : 2;
constexpr int HALF = 128;
constexpr int TILE_COLUMNS = (FEW ? 1 : 2) * HALF / (GATED ? 2 : 1);
constexpr bool PAIRED = FEW && CLUSTER > 1;                             // the blocks of a cluster share 128 columns
constexpr int ITEM_COLUMNS = PAIRED ? 2 * TILE_COLUMNS : TILE_COLUMNS;  // of a work item
constexpr int TEAM = FEW ? 1 : CLUSTER;                                 // blocks that share loads
static_assert(!PAIRED || (GATED && OUT == 3), "other results need no other block");
constexpr int BK = FP8 ? 128 : 64;  // columns of K in a stage: 128 bytes, the span of the swizzle
constexpr int A_BYTES = BM * 128;
constexpr int HALF_BYTES = HALF * 128;
constexpr int BOXES = FEW && !GATED ? 1 : 2, BOX_ROWS = FEW && GATED ? HALF / 2 : HALF;  // of a tile's weights
constexpr int BOX_BYTES = BOX_ROWS * 128;
constexpr int STAGE_BYTES = A_BYTES + BOXES * BOX_BYTES;
constexpr int WARP_STAGING = 2048;  // 16 rows of 128 bytes
// Floats between rows of sums in shared memory, for FEW. The lanes of a warp write to all banks.
constexpr int SUMS_STRIDE = HALF + 4;
constexpr int STAGING_BYTES = FEW ? BM * SUMS_STRIDE * 4 : 4 * MATH_WGS * WARP_STAGING;
// Scales of a stage: those of 128 rows, then of two halves. TMA copies them for the 4 stages of a round at once, 4 for each
// row. The memory of all stages holds the scales of two rounds.
constexpr int ROUND_BYTES = (128 + 2) * 16 + 96;  // a multiple of 128
constexpr int SCALE_BYTES = TMA_SCALES ? 2 * ROUND_BYTES / STAGES : FP8 ? (BM + 8) * 4 : 0;
static_assert(!TMA_SCALES || (FP8 && !FEW && STAGES == 4), "one copy brings the scales of 4 stages");
constexpr int TILES_AHEAD = 8;         // tiles that the producers may announce to the math warps in advance
constexpr int EARLY_STAGES = 3;        // stages of weights that are asked for while the dispatch still needs the memory
constexpr int TURN_BARRIERS = FEW ? 2 : 0;  // the phase of one ends with the kernel before; the other fills 16 bytes
constexpr int FEW_PAIRS = 2;           // most pairs of row tiles of a group whose odd tile comes after each band
constexpr int NO_MORE = -0x7FFFFFFF;   // rows of the announcement after the last tile
static_assert(!FEW || EARLY_STAGES <= STAGES);
constexpr bool HALVES = !GATED && !FEW;  // whether there are tiles of one half
constexpr int ONE_HALF = 1 << 30;      // marks a tile of one half in the announced column
// Sums of a thread: of a tile, and of the 128 weight rows that FP8 multiplies at a time.
constexpr int SUMS = FEW ? BM : 128, PARTIAL_SUMS = FEW ? BM : 64;
constexpr int PRODUCER_REGISTERS = FP8 && !GATHER ? 24 : 40;  // the rest goes to the math warpgroups, unless FEW
constexpr int MATH_REGISTERS = FP8 && !GATHER ? 240 : 232;
constexpr int MATH_WARPS = 4 * MATH_WGS;
constexpr bool THREADS_COPY = FP8 && !TMA_SCALES;  // scales, by all threads that produce
constexpr int OF_COPIES = THREADS_COPY ? 128 : 0;  // arrivals at a stage for these copies
// A warp loads up to 32 gathered rows of a tile. With FEW each lane starts the copy of its row, one lane after the other. Of
// many rows one lane starts all, with a third of the instructions: it finds their numbers in shared memory.
constexpr int NUMBERS = GATHER && !FEW ? BM : 0;
// Arrivals at a stage for these rows: of all warps, also of those that have none in a tile. One that nobody waited for could fall
// back by a round of the ring, and would then wait for a phase that does not come.
constexpr int OF_ROWS = NUMBERS > 0 ? 4 : 0;
constexpr int PRODUCING_WARPS = THREADS_COPY || OF_ROWS > 0 ? 4 : 1;
constexpr float SMALLEST = 1.17549435e-38f, LARGEST = 3.40282347e38f;  // normal numbers
constexpr int GATE_UP = 1, UP_GATE = 2, INTERLEAVED = 3;

// --- shared memory, barriers, copies --------------------------------------------------------------------------------

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
            "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(barrier), "r"(k), "r"(row), "h"((u16)3)
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%3, %4}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(k), "r"(row)
            : "memory");
    }
}

// One half of a weight tile: BOX_ROWS rows of `expert` from `column`. The map is [expert][half][row][k], or, interleaved,
// [expert][row][half][k]; without gate and up there is one half of all rows.
__device__ __forceinline__ void load_half(
    const TensorMap* map, u32 to, u32 barrier, int k, int column, int half, int expert, bool multicast) {
    int c1 = GATED ? column : column + half * HALF, c2 = GATED ? half : 0;
    if (GATED && ORDER == UP_GATE) c2 = 1 - half;
    if (GATED && ORDER == INTERLEAVED) {
        c1 = half;
        c2 = column;
    }
    if (multicast) {
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
            "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to), "l"(map), "r"(barrier), "r"(k), "r"(c1), "r"(c2),
            "r"(expert), "h"((u16)3)
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(k), "r"(c1), "r"(c2),
            "r"(expert)
            : "memory");
    }
}

// --- tiles ----------------------------------------------------------------------------------------------------------

// Called by a warp that has consumed a stage. Lane r arrives at `barrier` in the memory of block r of the team, because the
// other block may also load into the stage. `share` is 2 if the warp also arrives for the other warpgroup.
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

// Blocks of 128 columns of an activated result.
__device__ __forceinline__ int blocks_of(int columns) { return SHORT_BLOCKS ? (columns + 127) / 128 : columns / 128; }

// Row of the weight's scales, counted over all experts, for half 0 or 1 of a tile (128 rows share one). If gate and up are
// interleaved, both halves use both rows, the first one for the first 64 columns. With FEW, only gate and up that are not
// interleaved have different ones.
__device__ __forceinline__ long long weight_scales(int expert, int column, int columns, int half) {
    int blocks = (GATED ? 2 * columns : columns) + 127 >> 7, block = column / 128 + (half > 0);
    if (GATED) block = column / 128 + ((half > 0) == (ORDER == GATE_UP) ? blocks_of(columns) : 0);
    if (GATED && SHORT_BLOCKS && ORDER != INTERLEAVED) blocks = 2 * blocks_of(columns);
    if (GATED && ORDER == INTERLEAVED) block = column / 64 + (!FEW && half > 0);
    if (!GATED && FEW) block = column / 128;
    return (long long)expert * blocks + min(block, blocks - 1);
}

// Named barriers by which a warpgroup waits until the other has read all stages of a tile of its own: waiting for a
// stage further ahead would take an older phase of its barrier for the new one.
__device__ __forceinline__ void wait_turn(int wg) { asm volatile("bar.sync %0, 256;" ::"r"(1 + wg) : "memory"); }
__device__ __forceinline__ void give_turn(int wg) { asm volatile("bar.arrive %0, 256;" ::"r"(2 - wg) : "memory"); }

// Whether `value` holds in all threads of the warpgroup. The branch is uniform, because a product needs all its warps.
__device__ __forceinline__ bool all_of_warpgroup(int wg, bool value) {
    u32 all;
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.ne.b32 q, %1, 0;\nbar.red.and.pred p, %2, 128, q;\nselp.b32 %0, 1, 0, p;\n}"
        : "=r"(all)
        : "r"((u32)value), "r"(3 + wg)
        : "memory");
    return __all_sync(~0u, all);  // makes it warp-uniform for the compiler, like `uniform`
}

// Number of work items of a group; a cluster works on one at a time.
__device__ __forceinline__ int tiles_of(int rows, int tiles_n) {
    int tiles_m = ceil_div(rows, BM);
    if (TEAM == 1) return tiles_m * tiles_n;
    return tiles_m / 2 * tiles_n + tiles_m % 2 * ceil_div(tiles_n, 2);
}

// Called by the whole block: lists the groups that have tiles, and counts these. A search then passes over no others, of
// which there are many where each of few tokens has its own experts. `groups[num_groups].first` is the number of all tiles.
// Each warp takes 32 groups, so that memory is mostly waited for once; `totals` has the tiles and groups of each warp.
__device__ void count_tiles(Group* groups, int2* totals, const int* offsets, const RoutedIds& ids, const int* expert_ids,
                            const int* num_active, int num_groups, int num_experts, int capacity, int tiles_n) {
    constexpr int WARPS = MATH_WARPS + 4;
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
    if (threadIdx.x == 0) groups[listed].first = groups[num_groups].first = total;
    __syncthreads();
}

// The tile of this block in work item `index`. `g` is a group at or before the tile's, and advances to it. False past the
// last item.
__device__ __forceinline__ bool find_tile(
    const Group* groups, int num_groups, int index, int tiles_n, int band_width, u32 rank, int& g, Tile& tile) {
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

// --- tensor cores ---------------------------------------------------------------------------------------------------

// Lower word of the descriptor of a K-major operand in the 128-byte swizzle; 32 bytes of K advance it by 2. The upper word
// encodes that groups of 8 rows lie 1024 bytes apart.
__device__ __forceinline__ u32 descriptor(u32 address) { return (address & 0x3FFFF) >> 4 | 1 << 16; }

template <int N>
__device__ __forceinline__ void keep(float (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void mma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

#define F4(r, i) "+f"(r[i]), "+f"(r[i + 1]), "+f"(r[i + 2]), "+f"(r[i + 3])
#define F16(r, i) F4(r, i), F4(r, i + 4), F4(r, i + 8), F4(r, i + 12)
#define F64(r, i) F16(r, i), F16(r, i + 16), F16(r, i + 32), F16(r, i + 48)

#define SUMS_64 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21," \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41," \
    "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61," \
    "%62, %63"
#define SUMS_128 \
    SUMS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81," \
    "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101," \
    "%102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118," \
    "%119, %120, %121, %122, %123, %124, %125, %126, %127"

// Operands of a wgmma with descriptors of the lower words `a` and `b`.
#define DESCRIPTORS(a, b, add)                                     \
    "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, " add ", 0;\n" \
    "mov.b64 a, {" a ", 0x40000040};\nmov.b64 b, {" b ", 0x40000040};\n"

// d (+)= a[64, 32 bytes of K] * b[128 rows]^T; `add` 0 starts from zero.
__device__ __forceinline__ void mma_fp8(float (&d)[64], u32 a, u32 b, int add) {
    asm volatile(DESCRIPTORS("%64", "%65", "%66")
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" SUMS_64 "}, a, b, p, 1, 1;\n}"
                 : F64(d, 0)
                 : "r"(a), "r"(b), "r"(add));
}

// Loads a word of shared memory, or nothing, without a branch: after one, the compiler would assume a diverged warp.
__device__ __forceinline__ void load_word(float& to, u32 from, bool now) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.shared.f32 %0, [%1];\n}"
                 : "+f"(to)
                 : "r"(from), "r"((u32)now)
                 : "memory");
}

#if ROWS < 128  // few rows

#if FP8
#define OPERANDS_OF_FEW "k32.f32.e4m3.e4m3"
#define SIGNS_OF_FEW "1, 1"
#else
#define OPERANDS_OF_FEW "k16.f32.bf16.bf16"
#define SIGNS_OF_FEW "1, 1, 0, 0"
#endif

// d[64 weight rows, BM rows] (+)= weights[64, 32 bytes of K] * rows[BM]^T, in the sums from FIRST on.
template <int FIRST>
__device__ __forceinline__ void mma_few(float (&d)[BM], u32 weights, u32 rows, int add) {
#if ROWS == 8
    asm volatile(DESCRIPTORS("%4", "%5", "%6")
                 "wgmma.mma_async.sync.aligned.m64n8" OPERANDS_OF_FEW " {%0, %1, %2, %3}, a, b, p, " SIGNS_OF_FEW ";\n}"
                 : F4(d, FIRST)
                 : "r"(weights), "r"(rows), "r"(add));
#elif ROWS == 16
    asm volatile(DESCRIPTORS("%8", "%9", "%10")
                 "wgmma.mma_async.sync.aligned.m64n16" OPERANDS_OF_FEW " {%0, %1, %2, %3, %4, %5, %6, %7}, a, b, p, "
                 SIGNS_OF_FEW ";\n}"
                 : F4(d, FIRST), F4(d, FIRST + 4)
                 : "r"(weights), "r"(rows), "r"(add));
#else
    asm volatile(DESCRIPTORS("%16", "%17", "%18")
                 "wgmma.mma_async.sync.aligned.m64n32" OPERANDS_OF_FEW " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
                 "%12, %13, %14, %15}, a, b, p, " SIGNS_OF_FEW ";\n}"
                 : F16(d, FIRST)
                 : "r"(weights), "r"(rows), "r"(add));
#endif
}

// d (+)= weights[128] * rows[BM]^T over the 128 bytes of K of a stage. A thread has, in either half of `d`, of each 8 rows those
// of numbers lane % 4 * 2 and the next, d[4j] and d[4j + 1] with weight row `lane / 4` of its warp's 16, d[4j + 2] and d[4j + 3] with
// that 8 further.
__device__ __forceinline__ void multiply(float (&d)[BM], u32 weights, u32 rows, bool add) {
    keep(d);
    mma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        mma_few<0>(d, weights + 2 * k, rows + 2 * k, add || k > 0);
        mma_few<BM / 2>(d, weights + (HALF_BYTES / 2 >> 4) + 2 * k, rows + 2 * k, add || k > 0);
    }
    mma_commit();
}

// acc += part * (scale of the row * scale of the weight). Where that product is not a normal number, the scale of the row is
// applied first. `scales` are those of a stage.
__device__ __forceinline__ void add_up(float (&acc)[BM], float (&part)[BM], const float* scales) {
    const float2* of_rows = (const float2*)(scales + threadIdx.x % 4 * 2);
    float a[BM / 4], w[2] = {scales[BM], scales[BM + 1]};
#pragma unroll
    for (int j = 0; j < BM / 8; ++j) a[2 * j] = of_rows[4 * j].x, a[2 * j + 1] = of_rows[4 * j].y;
    mma_wait<0>();
    keep(part);
#pragma unroll
    for (int i = 0; i < BM; ++i) {
        float of_row = a[i % (BM / 2) / 4 * 2 + i % 2], of_weight = w[GATED && ORDER != INTERLEAVED ? i / (BM / 2) : 0];
        float both = of_row * of_weight, size = fabsf(both);
        bool apart = size < SMALLEST || size > LARGEST;  // NaN gives NaN either way
        float first = __fmul_rn(part[i], apart ? of_row : 1.0f);
        acc[i] = __fmaf_rn(first, apart ? of_weight : both, acc[i]);
    }
}
#else  // many rows

// part = a[64 rows] * b[128 rows]^T over the 128 bytes of K of a stage.
__device__ __forceinline__ void multiply(float (&part)[PARTIAL_SUMS], u32 a, u32 b) {
    keep(part);
    mma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) mma_fp8(part, a + 2 * k, b + 2 * k, k > 0);
    mma_commit();
}

// Like `mma_fp8` for bf16, into the first 64 sums.
template <int N>
__device__ __forceinline__ void mma_bf16_half(float (&d)[N], u32 a, u32 b, int add) {
    asm volatile(DESCRIPTORS("%64", "%65", "%66")
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SUMS_64 "}, a, b, p, 1, 1, 0, 0;\n}"
                 : F64(d, 0)
                 : "r"(a), "r"(b), "r"(add));
}

// With 256 rows of b.
__device__ __forceinline__ void mma_bf16(float (&d)[128], u32 a, u32 b, int add) {
    asm volatile(DESCRIPTORS("%128", "%129", "%130")
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" SUMS_128 "}, a, b, p, 1, 1, 0, 0;\n}"
                 : F64(d, 0), F64(d, 64)
                 : "r"(a), "r"(b), "r"(add));
}

// Factors of the partial sums of a thread's two rows in both halves: the product of both scales if that is a normal number.
// Else (`apart`) the scale of the row is applied first, then that of the weight.
struct Factors {
    float a[2], w[2], product[2][2];

    __device__ __forceinline__ bool apart(int r, int h) const {
        float size = fabsf(product[r][h]);
        return size < SMALLEST || size > LARGEST;  // NaN gives NaN either way
    }

    // Computes the products. Returns whether all of them and `least` are normal.
    __device__ __forceinline__ bool multiply(float least) {
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            product[i % 2][i / 2] = a[i % 2] * w[i / 2];
            least = fminf(least, fabsf(product[i % 2][i / 2])), most = fmaxf(most, fabsf(product[i % 2][i / 2]));
        }
        return !(least < SMALLEST || most > LARGEST);
    }
};

// acc += part * factors, for the half whose sums start at FIRST. Without PLAIN, products of scales may be not normal. Rows
// and halves with normal ones get the same bits: they multiply by 1 first.
template <int FIRST, bool PLAIN>
__device__ __forceinline__ void add_up(float (&acc)[SUMS], float (&part)[PARTIAL_SUMS], const Factors& factors) {
    keep(part);
#pragma unroll
    for (int i = 0; i < PARTIAL_SUMS; ++i) {
        int r = i / 2 % 2;
        int h = GATED && ORDER == INTERLEAVED ? i / 32 : FIRST / PARTIAL_SUMS;
        bool apart = !PLAIN && factors.apart(r, h);
        float first = PLAIN ? part[i] : __fmul_rn(part[i], apart ? factors.a[r] : 1.0f);
        acc[FIRST + i] = __fmaf_rn(first, apart ? factors.w[h] : factors.product[r][h], acc[FIRST + i]);
    }
    keep(acc);  // finish before the next products overwrite `part`
}
#endif  // many rows

// --- epilogue -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 word;
    if (OUT == 1) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    }
    return word;
}

// x * sigmoid(slope), given `negative`, -slope.
__device__ __forceinline__ float times_sigmoid(float x, float negative) {
    float inverse;
    asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + __expf(negative)));
    return __fmul_rn(x, inverse);
}

// The activation function of gate, or of up where there is no gate.
__device__ __forceinline__ float function_of(float x, float alpha) {
    if (FUNCTION == RELU2) return squared_relu(x);
    if (FUNCTION == GELU) return gelu(x);
    return times_sigmoid(x, FUNCTION == GELU_TANH ? -gelu_tanh_slope(x) : -alpha * x);
}

__device__ __forceinline__ float activated(float gate, float up, float alpha, float limit, float up_offset) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : (up < -limit ? -limit : up);
#ifdef UP_SOFTCAP
    up = softcapped(up, UP_SOFTCAP);
#endif
#ifdef GATE_SOFTCAP
    float y = times_sigmoid(softcapped(gate, GATE_SOFTCAP), -alpha * gate);
#else
    float y = function_of(gate, alpha);
#endif
    return __fmul_rn(y, __fadd_rn(up, up_offset));
}

// The largest word in the four lanes that hold a row.
__device__ __forceinline__ u32 max_of_row(u32 x) {
    x = max(x, __shfl_xor_sync(~0u, x, 1));
    return max(x, __shfl_xor_sync(~0u, x, 2));
}

// A thread of a math warpgroup holds rows `lane / 4` and `lane / 4 + 8` of its warp's 16, and two columns of each 8:
// r[4j], r[4j + 1] of the first row, r[4j + 2], r[4j + 3] of the second, columns 8j + lane % 4 * 2 and the next.

// Writes 16 rows of 128 bytes from a warp's staging memory; only `bytes` of a row belong to the result.
__device__ __forceinline__ void write_rows(const u8* staging, u8* out, long long stride, int rows, int bytes) {
    int lane = threadIdx.x % 32, chunk = lane % 8;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int row = i * 4 + lane / 8;
        int4 value = *(const int4*)(staging + row * 128 + ((chunk ^ row % 8) << 4));
        if (row < rows && chunk * 16 < bytes) *(int4*)(out + row * stride + chunk * 16) = value;
    }
    __syncwarp();
}

// Stores COLUMNS columns of the warp's 16 rows from `r`; `columns` of them exist.
template <int COLUMNS, int N>
__device__ __forceinline__ void store(
    const float (&r)[N], u8* staging, u8* out, long long stride, int rows, int columns) {
    constexpr int SIZE = OUT == 2 ? 4 : 2, GROUPS = 16 / SIZE;  // groups of 8 columns in 128 bytes
    int lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
#pragma unroll
    for (int part = 0; part < COLUMNS / 8 / GROUPS; ++part) {
#pragma unroll
        for (int j = 0; j < GROUPS; ++j) {
            int i = 4 * (part * GROUPS + j);
            if (OUT == 2) {
                u32 at = row * 128 + (((2 * j + quad / 2) ^ row) << 4) + quad % 2 * 8;
                *(float2*)(staging + at) = make_float2(r[i], r[i + 1]);
                *(float2*)(staging + at + 1024) = make_float2(r[i + 2], r[i + 3]);
            } else {
                u32 at = row * 128 + ((j ^ row) << 4) + quad * 4;
                *(u32*)(staging + at) = pack(r[i], r[i + 1]);
                *(u32*)(staging + at + 1024) = pack(r[i + 2], r[i + 3]);
            }
        }
        write_rows(staging, out + part * 128, stride, rows, columns * SIZE - part * 128);
    }
}

// Quantizes numbers of a block whose largest magnitude has these bits, as `quantize.quantize_tile` does.
struct Quantizer {
    bool poisoned;  // by NaN or Inf
    float scale, inverse;

    __device__ __forceinline__ explicit Quantizer(u32 bits) {
        poisoned = bits >= 0x7F800000;
        u32 amax = poisoned ? 0 : bits;
        scale = __fdiv_rn(__uint_as_float(max(amax, 0x38D1B717)), 448.0f);  // amax at least 1e-4
        inverse = __frcp_rn(scale);
    }

    __device__ __forceinline__ float stored_scale() const { return poisoned ? __uint_as_float(0x7FC00000) : scale; }

    __device__ __forceinline__ u16 codes(float low, float high) const {
        u16 codes;
        low = divide(low, scale, inverse), high = divide(high, scale, inverse);
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
        return poisoned ? (u16)0 : codes;
    }
};

// Quantizes 128 columns of each row from `r[FIRST]` on, one block, and stores `columns` of them, past which there are zeros.
// `scales` is that of the first row.
template <int FIRST, int N>
__device__ __forceinline__ void store_quantized(
    const float (&r)[N], u8* staging, u8* out, long long stride, int rows, int columns, float* scales, int scale_stride) {
    int lane = threadIdx.x % 32, quad = lane % 4;
#pragma unroll
    for (int second = 0; second < 2; ++second) {
        u32 bits = 0;
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            bits = max(bits, __float_as_uint(r[FIRST + 4 * j + 2 * second]) & 0x7FFFFFFF);
            bits = max(bits, __float_as_uint(r[FIRST + 4 * j + 2 * second + 1]) & 0x7FFFFFFF);
        }
        Quantizer quantizer(max_of_row(bits));
        int row = lane / 4 + 8 * second;
        if (quad == 0 && row < rows) scales[row * scale_stride] = quantizer.stored_scale();
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            u16 codes = quantizer.codes(r[FIRST + 4 * j + 2 * second], r[FIRST + 4 * j + 2 * second + 1]);
            u32 at = row * 128 + ((j / 2 ^ row % 8) << 4) + j % 2 * 8 + quad * 2;
            *(u16*)(staging + at) = codes;
        }
    }
    write_rows(staging, out, stride, rows, SHORT_BLOCKS ? columns : 128);
}

// acc * row_scale * expert_scale + bias, one after the other.
struct Extras {
    const float *row_scale, *expert_scales, *bias;
    int scales_per_expert;
};

// Whose sum half `h` of a tile has for column `n` of the result: the row of the expert's weight, and whether it is of up.
struct WeightRow {
    int row, up;

    __device__ __forceinline__ WeightRow(int n, int h, int columns) : row(n), up(h) {
        if (GATED) {
            row = ORDER == INTERLEAVED ? 2 * n + h : n + (h == (ORDER == GATE_UP) ? columns : 0);
        } else if (ORDER == INTERLEAVED) {
            up = n % 2;
        } else {
            up = (n >= columns / 2) == (ORDER == GATE_UP);
        }
    }
};

// One sum of half `h` of a tile and column `n` of the result.
__device__ __forceinline__ float with_extras(float sum, const Extras& x, int row, int expert, int n, int h, int columns) {
    int num_rows = GATED ? 2 * columns : columns;
    WeightRow of(n, h, columns);
    float r = x.row_scale ? x.row_scale[row] : 1.0f, s = 1.0f;
    if (x.expert_scales) s = x.expert_scales[(long long)expert * x.scales_per_expert + (x.scales_per_expert == 2 ? of.up : 0)];
    float b = x.bias && n < columns ? x.bias[(long long)expert * num_rows + of.row] : -0.0f;
    return __fadd_rn(__fmul_rn(__fmul_rn(sum, r), s), b);
}

__device__ __forceinline__ void apply_extras(
    float (&acc)[SUMS], const Extras& x, int row, int last_row, int expert, int column, int columns) {
    int num_rows = GATED ? 2 * columns : columns, quad = threadIdx.x % 4;
    float r0 = x.row_scale ? x.row_scale[min(row, last_row)] : 1.0f;
    float r1 = x.row_scale ? x.row_scale[min(row + 8, last_row)] : 1.0f;
    const float* scales = x.expert_scales ? x.expert_scales + (long long)expert * x.scales_per_expert : nullptr;
    const float* bias = x.bias ? x.bias + (long long)expert * num_rows : nullptr;
#pragma unroll
    for (int j = 0; j < SUMS / 4; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            int n = column + 8 * (GATED ? j % 16 : j) + 2 * quad + c;
            WeightRow of(n, j / 16, columns);
            float s = scales ? scales[x.scales_per_expert == 2 ? of.up : 0] : 1.0f;
            float b = bias && n < columns ? bias[of.row] : -0.0f;
            float &low = acc[4 * j + c], &high = acc[4 * j + 2 + c];
            low = __fadd_rn(__fmul_rn(__fmul_rn(low, r0), s), b);
            high = __fadd_rn(__fmul_rn(__fmul_rn(high, r1), s), b);
        }
    }
}

// --- epilogue of few rows -------------------------------------------------------------------------------------------

constexpr int ROW_THREADS = FEW ? 128 / BM : 1;  // that have a row

// What a warp and the one of the same number in the other block tell each other of a tile: the largest bits of its rows. Two
// tiles in turn use one of two places. A block writes into the next but one only when it knows the next of the other block,
// which then has read this one.
struct Maxima {
    const u32* here;                            // of this thread's row
    u32 there, arrived, arrived_there, parity;  // shared-memory addresses: in the other block, and of barriers
};

// The larger of this block's and of the other one's bits of a row.
__device__ __forceinline__ u32 largest_of_pair(const Maxima& x, u32 bits) {
    int lane = threadIdx.x % 32;
    if (lane == 0) barrier_expect(x.arrived, 32 / ROW_THREADS * 4);
    if (lane % ROW_THREADS == 0) {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(x.there), "r"(bits),
                     "r"(x.arrived_there)
                     : "memory");
    }
    barrier_wait(x.arrived, x.parity);
    return max(bits, *x.here);
}

__device__ __forceinline__ void sync_warpgroup() { asm volatile("bar.sync %0, 128;" ::"r"(1) : "memory"); }

// Writes the sums of a tile to shared memory by rows, as [BM, SUMS_STRIDE]. A thread has them by weight rows.
__device__ __forceinline__ void share_sums(const float (&acc)[SUMS], float* sums) {
    int lane = threadIdx.x % 32;
    float* of_lane = sums + lane % 4 * 2 * SUMS_STRIDE + threadIdx.x / 32 * 16 + lane / 4;
    sync_warpgroup();  // those of the last tile have been read
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        int half = i / (SUMS / 2), j = i % (SUMS / 2) / 4;
        of_lane[(8 * j + i % 2) * SUMS_STRIDE + half * 64 + i / 2 % 2 * 8] = acc[i];
    }
    sync_warpgroup();
}

// Writes the rest of a row of `bytes` from a thread's part of it on.
template <int WORDS>
__device__ __forceinline__ void write_words(u8* to, const u32 (&words)[WORDS], int bytes) {
    if (WORDS == 1 && bytes > 0) *(u32*)to = words[0];
    if (WORDS == 2 && bytes > 0) *(uint2*)to = make_uint2(words[0], words[WORDS - 1]);
#pragma unroll
    for (int i = 0; i + 3 < WORDS; i += 4)
        if (4 * i < bytes) *(uint4*)(to + 4 * i) = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
}

// The rest of a tile: each thread has OF_THREAD neighbouring columns of a row. `out_scales` null stores none.
__device__ __forceinline__ void store_few(const float* sums, const Extras& extras, const Tile& tile, int last_row,
                                          int columns, float alpha, float limit, float up_offset, u8* out,
                                          long long out_stride, float* out_scales, const Maxima& maxima) {
    constexpr int OF_THREAD = TILE_COLUMNS / ROW_THREADS, SIZE = OUT == 3 ? 1 : (OUT == 2 ? 4 : 2), PARTS = GATED ? 2 : 1;
    int row = threadIdx.x / ROW_THREADS, first = threadIdx.x % ROW_THREADS * OF_THREAD;
    long long position = tile.start + row;
    // A cluster may reach past the last column; that is not stored.
    int width = row < tile.rows ? min(columns - tile.column, TILE_COLUMNS) : 0;
    float x[PARTS][OF_THREAD];
#pragma unroll
    for (int h = 0; h < PARTS; ++h) {
#pragma unroll
        for (int i = 0; i < OF_THREAD; ++i) {
            x[h][i] = sums[row * SUMS_STRIDE + h * TILE_COLUMNS + first + i];
            if (EXTRAS) {
                int of_row = min((int)position, last_row);
                x[h][i] = with_extras(x[h][i], extras, of_row, tile.expert, tile.column + first + i, h, columns);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < OF_THREAD; ++i) {
        if (GATED) x[0][i] = activated(x[0][i], x[PARTS - 1][i], alpha, limit, up_offset);
        if (ACTIVATED && !GATED) x[0][i] = function_of(x[0][i], alpha);
    }
    u32 words[OF_THREAD * SIZE / 4];
    if (OUT == 3) {
        u32 bits = 0;
#pragma unroll
        for (int i = 0; i < OF_THREAD; ++i) bits = max(bits, __float_as_uint(x[0][i]) & 0x7FFFFFFF);
#pragma unroll
        for (int step = 1; step < ROW_THREADS; step *= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, step));
        if (PAIRED) bits = largest_of_pair(maxima, bits);
        Quantizer quantizer(bits);
        if (first == 0 && width > 0 && out_scales)
            out_scales[position * blocks_of(columns) + tile.column / 128] = quantizer.stored_scale();
#pragma unroll
        for (int i = 0; i < OF_THREAD; i += 4)
            words[i / 4] = quantizer.codes(x[0][i], x[0][i + 1]) | (u32)quantizer.codes(x[0][i + 2], x[0][i + 3]) << 16;
    } else if (OUT == 2) {
#pragma unroll
        for (int i = 0; i < OF_THREAD; ++i) words[i * SIZE / 4] = __float_as_uint(x[0][i]);
    } else {
#pragma unroll
        for (int i = 0; i < OF_THREAD; i += 2) words[i * SIZE / 4] = pack(x[0][i], x[0][i + 1]);
    }
    write_words(out + (position * out_stride + tile.column + first) * SIZE, words, (width - first) * SIZE);
}

// --- kernel ---------------------------------------------------------------------------------------------------------

extern __shared__ __align__(1024) u8 shared[];

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(128 * (MATH_WGS + 1), FEW ? 2 : 1)
tma_gemm(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap w_map,
         const __grid_constant__ TensorMap scales_map, const int* row_index, const float* a_scales, const float* w_scales,
         Extras extras, u8* out, long long out_stride, float* out_scales,
         const int* offsets, const int* expert_ids, const int* num_active, int num_groups, int num_experts,
         int capacity, int columns, int k_blocks, int band_width, int settled, float alpha, float limit,
         float up_offset, const void* topk_idx, int num_ids, int id_bytes, int loads_after_ns) {
    u8* staging = shared + STAGES * STAGE_BYTES;
    float* scales = (float*)(staging + STAGING_BYTES);
    u64* barriers = (u64*)((u8*)scales + STAGES * SCALE_BYTES);
    // Tiles that the producers announce to the math warps: start, rows, expert, column.
    int4* tiles = (int4*)(barriers + 2 * STAGES + TILES_AHEAD + TURN_BARRIERS);
    Group* groups = (Group*)(tiles + TILES_AHEAD);
    int* numbers = (int*)(groups + num_groups + 1);  // of the rows of the tile that is being loaded, if they are gathered
    u64* told = (u64*)(numbers + NUMBERS);  // barriers of the other block's maxima, of each warp for two tiles
    u32* maxima = (u32*)(told + 2 * MATH_WARPS);
    int2* totals = (int2*)staging;  // of the groups of each warp
    u32 full = shared_address(barriers), empty = full + 8 * STAGES, known = empty + 8 * STAGES, ended = known + 8 * TILES_AHEAD;
    u32 ring = shared_address(shared);
    int wg = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    int tiles_n = ceil_div(columns, ITEM_COLUMNS), step = gridDim.x / CLUSTER;  // between work items of a cluster
    u32 rank = cluster_rank();

    if (threadIdx.x == 32) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1 + OF_COPIES + OF_ROWS);
            barrier_init(empty + 8 * s, MATH_WARPS * TEAM * ARRIVALS_OF_WARP);
        }
        for (int i = 0; i < TILES_AHEAD; ++i) barrier_init(known + 8 * i, 1);
        if (FEW) barrier_init(ended, 1);
        for (int i = 0; i < 2 * MATH_WARPS && PAIRED; ++i) barrier_init(shared_address(told) + 8 * i, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    enter_cluster();
    if (threadIdx.x == 64) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&w_map) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&a_map) : "memory");
    }
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
        for (int t = blockIdx.x / CLUSTER; t < last; t += step) {
            int halved = max(t - whole, 0), halves = HALVES && t >= whole ? 1 : BOXES;
            if (!find_tile(groups, num_groups, t - ceil_div(halved, 2), tiles_n, band_width, rank, g, tile)) break;
            tile.column += halved % 2 * HALF;
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
                for (int h = shared_weights ? rank : 0; h < halves; h += shared_weights ? TEAM : 1)
                    load_half(&w_map, b + h * BOX_BYTES, ready, kb * BK, tile.column, h, tile.expert, shared_weights);
            };
            if (begins) {
                if (leader && loads_after_ns > 0) barrier_wait_for(ended, 0, loads_after_ns);
                ahead = min(ids.given() ? EARLY_STAGES : STAGES, k_blocks);
                for (int s = 0; s < ahead && leader; ++s) {
                    barrier_expect(full + 8 * s, box_bytes + halves * BOX_BYTES);
                    load_weights(ring + s * STAGE_BYTES + A_BYTES, full + 8 * s, s);
                }
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
                barrier_wait(empty + 8 * stage, ~phase >> stage & 1);
                __syncwarp();  // a late lane would wait for the following round
                if (leader) {
                    bool scales_too = TMA_SCALES && stage == 0;
                    if (!FEW || ahead <= 0)
                        barrier_expect(ready, box_bytes + halves * BOX_BYTES + (scales_too ? (BM + 2) * 16 : 0));
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
            store_few((float*)staging, extras, tile, capacity - 1, columns, alpha, limit, up_offset, out, out_stride,
                      rank > 0 ? nullptr : out_scales, of_pair);
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
                for (int i = 0; i < 64; ++i) acc[i] = activated(acc[i], acc[64 + i], alpha, limit, up_offset);
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
