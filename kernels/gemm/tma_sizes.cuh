// Sizes of tma_gemm.cu that follow from its macros, and what its parts share, for inclusion.

#ifndef MOE_RUNTIME_TMA_SIZES
#define MOE_RUNTIME_TMA_SIZES

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
constexpr bool FEW = BM < 128, TALL = BM > 128, NARROW = FEW || TALL;  // NARROW: tiles of 128 weight rows
constexpr int MATH_WGS = FEW ? 1 : 2;
constexpr int HALF = 128;
constexpr int TILE_COLUMNS = (NARROW ? 1 : 2) * HALF / (GATED ? 2 : 1);
constexpr bool PAIRED = NARROW && CLUSTER > 1;  // the blocks of a cluster work on the same rows of two column tiles
constexpr int ITEM_COLUMNS = PAIRED ? 2 * TILE_COLUMNS : TILE_COLUMNS;  // of a work item
constexpr int TEAM = FEW ? 1 : CLUSTER;                                 // blocks that share loads
constexpr int BK = FP8 ? 128 : 64;  // columns of K in a stage: 128 bytes, the span of the swizzle
constexpr int A_BYTES = BM * 128;
constexpr int HALF_BYTES = HALF * 128;
constexpr int BOXES = NARROW && !GATED ? 1 : 2, BOX_ROWS = NARROW && GATED ? HALF / 2 : HALF;  // of a tile's weights
constexpr int BOX_BYTES = BOX_ROWS * 128;
constexpr int STAGE_BYTES = A_BYTES + BOXES * BOX_BYTES;
constexpr int WARP_STAGING = 2048;  // 16 rows of 128 bytes
// Floats between rows of sums in shared memory, for FEW. The lanes of a warp write to all banks.
constexpr int SUMS_STRIDE = HALF + 4;
constexpr int STAGING_BYTES = FEW ? BM * SUMS_STRIDE * 4 : 4 * MATH_WGS * WARP_STAGING;
// Scales of a stage: those of the rows, then of two halves. TMA copies them for the 4 stages of a round at once, 4 for
// each row. The memory of all stages holds the scales of two rounds.
constexpr int SCALE_BOX = 128;                                  // rows of a box of scales
constexpr int ROUND_BYTES = ((TALL ? BM : 128) + 2) * 16 + 96;  // a multiple of 128
constexpr int SCALE_BYTES = TMA_SCALES ? 2 * ROUND_BYTES / STAGES : FP8 ? (BM + 8) * 4 : 0;
constexpr int TILES_AHEAD = 8;   // tiles that the producers may announce to the math warps in advance
constexpr int EARLY_STAGES = 3;  // stages of weights that are asked for while the dispatch still needs the memory
constexpr int TURN_BARRIERS = FEW ? 2 : 0;  // the phase of one ends with the kernel before; the other fills 16 bytes
constexpr int FEW_PAIRS = 2;                // most pairs of row tiles of a group whose odd tile comes after each band
constexpr int NO_MORE = -0x7FFFFFFF;        // rows of the announcement after the last tile
constexpr bool HALVES = !GATED && !NARROW;  // whether there are tiles of one half
constexpr int ONE_HALF = 1 << 30;           // marks a tile of one half in the announced column
// Sums of a thread: of a tile, and of the 128 weight rows that FP8 multiplies at a time.
constexpr int SUMS = FEW ? BM : 128, PARTIAL_SUMS = FEW ? BM : 64;
// Warpgroups that do not multiply. The first one loads, and expands weights unless these are PACKED. Others only
// expand.
constexpr int PRODUCER_WGS = PACKED ? 3 : EXPAND ? 2 : 1;
constexpr bool IN_STAGES = EXPAND && !AHEAD;  // weights are expanded by those who fill the ring
constexpr bool IN_TURNS = PACKED || TALL;     // two warpgroups expand whole stages, in turn
constexpr int MATH_WARPS = 4 * MATH_WGS;
constexpr int THREADS = 128 * (MATH_WGS + PRODUCER_WGS);
// Registers of a thread, unless a block has two warpgroups alone: what those that produce do without goes to the math
// warpgroups.
constexpr bool SHARED_OUT = !FEW || PACKED;
constexpr int REGISTERS = FEW ? 256 : PRODUCER_WGS > 1 ? 512 : 504;  // of a thread of each warpgroup together
constexpr int PRODUCER_REGISTERS = IN_STAGES && !PACKED ? 56 : FP8 && !GATHER && !AHEAD && !PACKED ? 24 : 40;
constexpr int EXPANDER_REGISTERS = AHEAD ? 56 : PACKED ? 48 : PRODUCER_WGS > 1 ? 40 : 0;
constexpr int MATH_REGISTERS =
    (REGISTERS - PRODUCER_REGISTERS - (PRODUCER_WGS - 1) * EXPANDER_REGISTERS) / (8 * MATH_WGS) * 8;
constexpr bool THREADS_COPY = FP8 && !TMA_SCALES;  // scales, by all threads of the warps that load
// A warp loads up to 32 gathered rows of a tile. With FEW each lane starts the copy of its row, one lane after the
// other. Of many rows one lane starts all, with a third of the instructions: it finds their indices in shared memory.
constexpr int ROW_INDICES = GATHER && !FEW ? BM : 0;
// Arrivals at a stage for these rows: of all warps, also of those that have none in a tile. One that nobody waited for
// could fall back by a round of the ring, and would then wait for a phase that does not come.
constexpr int OF_ROWS = ROW_INDICES > 0 ? 4 : 0;
// And for weights: of each warpgroup that expands a part of the stage.
constexpr int OF_EXPANSION = IN_STAGES ? 4 * (IN_TURNS ? 1 : PRODUCER_WGS) * ARRIVALS_OF_WARP : 0;
constexpr int PRODUCING_WARPS = !PACKED && (THREADS_COPY || OF_ROWS > 0 || IN_STAGES) ? 4 : 1;
constexpr int OF_COPIES = THREADS_COPY ? 32 * PRODUCING_WARPS : 0;       // arrivals at a stage for copies by threads
constexpr int TABLE_BYTES = EXPAND ? (EXPAND == 16 ? 256 : 64) * 8 : 0;  // of e4m3 numbers by scale codes
// Packed weights: a unit has 64 rows of a block of K, quants and then scale codes.
constexpr int UNIT_ROWS = 64, UNIT_EXPANDED = UNIT_ROWS * 128, UNIT_QUANTS = UNIT_ROWS * 64,
              SCALES_OF_WORD = EXPAND == 16 ? 2 : 1;
constexpr int UNIT_BYTES = UNIT_QUANTS + 4 * UNIT_ROWS * SCALES_OF_WORD, UNITS = NARROW ? 2 : 4;  // of a stage
constexpr int PACKED_BYTES = PACKED * UNITS * UNIT_BYTES;                                         // of the ring of them
constexpr float SMALLEST = 1.17549435e-38f, LARGEST = 3.40282347e38f;                             // normal numbers
constexpr int GATE_UP = 1, UP_GATE = 2, INTERLEAVED = 3;

constexpr int RING_BYTES = STAGES * (STAGE_BYTES + SCALE_BYTES) + PACKED_BYTES + STAGING_BYTES + TABLE_BYTES;

static_assert(ROWS == 8 || ROWS == 16 || ROWS == 32 || ROWS == 128 || ROWS == 256, "ROWS: wgmma has no such tile here");
static_assert(STAGES >= 2 && STAGES < TILES_AHEAD,
              "STAGES: one is loaded while another is multiplied, and math warps know the "
              "tiles of all");
static_assert(RING_BYTES < 227 * 1024, "STAGES: the ring is larger than the shared memory of a block");
static_assert(STAGE_BYTES % 1024 == 0 || FEW, "ROWS: the swizzle repeats after 1024 bytes");
static_assert(CLUSTER == 1 || CLUSTER == 2, "CLUSTER: a block shares loads with one other at most");
static_assert(!PAIRED || TALL || (GATED && OUT == 3),
              "CLUSTER: blocks of few rows need another one for scales of gated results alone");
static_assert(A_BOX >= 1 && A_BOX <= 256 && BM % A_BOX == 0,
              "A_BOX: boxes fill a tile, and TMA has boxes of 256 rows at most");
static_assert(!TMA_SCALES || (FP8 && !FEW && STAGES == 4), "TMA_SCALES: one copy brings the scales of 4 stages");
static_assert(OUT >= 0 && OUT <= 3 && (OUT != 3 || ACTIVATED), "OUT: 0 to 3, and 3 for activated results");
static_assert(!GATED || ACTIVATED, "GATED: a gated result is activated");
static_assert(!GATED || (ORDER >= GATE_UP && ORDER <= INTERLEAVED), "ORDER: of gate and up of a gated result");
static_assert(!FEW || EXPAND || EARLY_STAGES <= STAGES, "STAGES: fewer than are loaded before the rows are there");

static_assert(EXPAND == 0 || EXPAND == 16 || EXPAND == 32, "EXPAND: weights of a block scale, of nvfp4 or mxfp4");
static_assert(!EXPAND || FP8, "EXPAND: weights are expanded for FP8 alone");
static_assert(!PACKED || EXPAND, "PACKED: a ring of weights that are expanded");
static_assert(!EXPAND || (PACKED > 0) == FEW, "PACKED: with tiles of few rows weights come through a ring");
static_assert(!EXPAND || FEW || CLUSTER == 2, "CLUSTER: weights that are expanded have no tiles of single blocks");
static_assert(PACKED % 2 == 0, "PACKED: half of the stages for each of two warpgroups");
static_assert(!AHEAD || (EXPAND && !PACKED), "AHEAD: of weights that are expanded, and not in shared memory");
static_assert(!TALL || (IN_STAGES && !PACKED && !GATHER), "ROWS: of 256 that lie side by side, for expanded weights");
// A warpgroup that did not wait for each phase of a barrier could take an earlier one for that of its stage.
static_assert(!IN_TURNS || STAGES % 2 == 0, "STAGES: each is always expanded by the same of two warpgroups");
static_assert(!TALL || CLUSTER == 2, "CLUSTER: two blocks load rows and scales of 256 for each other");
static_assert(!TALL || !GATED || ORDER != INTERLEAVED, "ORDER: expanded weights have gate above up");
static_assert(!SHARED_OUT ||
                  PRODUCER_REGISTERS + (PRODUCER_WGS - 1) * EXPANDER_REGISTERS + MATH_WGS * MATH_REGISTERS <= REGISTERS,
              "EXPAND: a block has no more registers, and would wait for them for ever");

// Blocks of 128 columns of an activated result.
__device__ __forceinline__ int blocks_of(int columns) { return SHORT_BLOCKS ? (columns + 127) / 128 : columns / 128; }

#endif
