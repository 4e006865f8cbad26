// The grouped GEMM of dequant_gemm.cu for a few rows in all: the same bits with small teams of warps, of which an SM
// has several of both GEMMs of a layer. The second GEMM loads its first weights while the first still multiplies,
// `loads_after_ns` after it has begun: earlier loads would delay those of the first. The first loads weights while the
// rows are dispatched, if it gets `topk_idx`, the ids that the groups count.
//
// A tile is 64 weight rows and at most 8 tokens. Each of a team's four consumers, warps, multiplies 16 weight rows by
// `mma.sync`, which for operands of bf16 gives the bits of `wgmma` (tests/kernels/test_dequant_gemm.py). A fifth warp,
// the producer, finds the tiles and streams their weights through a ring of stages. A block is one team, or TEAMS of
// them that go their own ways: all that they share is a table for requantization.
//
// A team dequantizes the tokens of a tile itself, once, and holds them by rows: all columns of one row, or as many
// columns of more rows as there is room for. CHAINED tokens are the results of the kernel before, rows of bf16.
//
// Macros: those of dequant_unit.cuh and dequant_result.cuh, with MAX_BLOCKS 1, and
//   TEAMS, BLOCKS_PER_SM (of all kernels that run at a time), STAGES, STAGE_K64 (columns of a stage / 64; divides
//   `units`), CHUNK (columns of a chunk of weights / 64; divides STAGE_K64), MAX_GROUPS (a multiple of 32), KEEP_TOKENS
//   (L2 keeps tokens and evicts weights first), CHAINED, OWN_BYTES (room for tokens), those of token_piece.cuh. K is
//   `units` times 64.

#include "dequant_result.cuh"
#include "dequant_unit.cuh"
#include "routed_ids.cuh"
#include "token_piece.cuh"

static_assert(MAX_BLOCKS == 1, "MAX_BLOCKS: a tile is one block of 8 tokens");
static_assert(MAX_GROUPS % 32 == 0, "MAX_GROUPS: each lane of a warp has as many");
static_assert(STAGES >= 2 && STAGE_K64 % CHUNK == 0, "CHUNK: a stage is whole chunks, of which one is loaded ahead");
static_assert(TEAMS >= 1 && TEAMS * 160 <= 1024, "TEAMS: of five warps each, in one block");
static_assert(OWN_BYTES % 16 == 0, "OWN_BYTES: tokens and stages begin at 16 bytes");

constexpr int CONSUMERS = 128;  // threads of a team; those of all teams come first, then the producers
constexpr int STAGE_BYTES = STAGE_K64 * UNIT_BYTES;
constexpr int TEAM_BYTES = STAGES * STAGE_BYTES + OWN_BYTES;
constexpr int TILES_AHEAD = 8;  // tiles that a producer may announce in advance

__device__ __forceinline__ void store_16(u32 address, const u32* v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}

// A consumer's team, and its place there, which the compiler does not see where there is one team. `finish` takes a
// team for a warpgroup.
__device__ __forceinline__ int team_of_consumer() { return TEAMS == 1 ? 0 : threadIdx.x / CONSUMERS; }
__device__ __forceinline__ int place_in_team() { return TEAMS == 1 ? threadIdx.x : threadIdx.x % CONSUMERS; }

// All consumers of a team come together, or those of all teams.
__device__ __forceinline__ void meet() {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + team_of_consumer()), "n"(CONSUMERS) : "memory");
}
__device__ __forceinline__ void meet_all() {
  asm volatile("bar.sync %0, %1;" ::"n"(1 + TEAMS), "n"(TEAMS * CONSUMERS) : "memory");
}

// acc[16 weight rows, 8 tokens] += a * b, over 16 columns.
__device__ __forceinline__ void warp_product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The tiles in their order: of each group one after the other its parts of 8 tokens, each with all weight rows. A whole
// warp has it in its registers; a lane has neighbouring groups.
struct Tiles {
  static constexpr int GROUPS = MAX_GROUPS / 32;
  int offsets[GROUPS + 1], experts[GROUPS];
  int own, before;  // parts of this lane's groups, and of those of the lanes before
  int all;          // tiles

  // The offsets, or the ids that they count, may have been written by the kernel before the last: L1 could have what
  // they were before.
  __device__ __forceinline__ void read(const int* group_offsets, const RoutedIds& ids, const int* expert_ids,
                                       int num_groups, int num_experts, int capacity, int unit_rows) {
    const int lane = threadIdx.x & 31, first = lane * GROUPS;
    if (ids.given()) {
      ids.find_offsets<GROUPS>(first, num_groups, offsets);
    } else {
#pragma unroll
      for (int i = 0; i <= GROUPS; ++i) offsets[i] = __ldcg(group_offsets + min(first + i, num_groups));
    }
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) experts[i] = first + i < num_groups ? __ldcg(expert_ids + first + i) : -1;
    own = 0;
#pragma unroll
    for (int i = 0; i <= GROUPS; ++i) offsets[i] = min(max(offsets[i], 0), capacity);
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) own += ceil_div(rows_of(i, num_experts), TILE_TOKENS);
    before = own;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const int others = __shfl_up_sync(0xFFFFFFFF, before, lanes);
      if (lane >= lanes) before += others;
    }
    all = __shfl_sync(0xFFFFFFFF, before, 31) * unit_rows;
    before -= own;
  }

  __device__ __forceinline__ int rows_of(int i, int num_experts) const {
    int end = offsets[i + 1];
    // So that they are computed for each tile: the compiler would keep them in registers, of which there are too few.
    asm volatile("" : "+r"(end));
    return static_cast<u32>(experts[i]) >= static_cast<u32>(num_experts) ? 0 : max(end - offsets[i], 0);
  }

  // Tile `number`; without rows if there are not so many.
  __device__ __forceinline__ Tile find(int number, int num_experts, int unit_rows) const {
    Tile tile = {};
    if (number >= all) return tile;
    const int lane = threadIdx.x & 31, part = number / unit_rows;
    // In the lane that has the part.
    int left = part - before;
    const u32 lanes = __ballot_sync(0xFFFFFFFF, left >= 0 && left < own);
    tile.unit = number - part * unit_rows;
    tile.high = 1;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      const int rows = rows_of(i, num_experts), parts = ceil_div(rows, TILE_TOKENS);
      if (left >= 0 && left < parts) {
        tile.group = lane * GROUPS + i, tile.start = offsets[i], tile.local = left * TILE_TOKENS,
        tile.expert = experts[i];
        tile.rows = min(rows - tile.local, TILE_TOKENS);
      }
      left -= parts;
    }
    const int from = __ffs(lanes) - 1;
    tile.group = __shfl_sync(0xFFFFFFFF, tile.group, from);
    tile.start = __shfl_sync(0xFFFFFFFF, tile.start, from);
    tile.local = __shfl_sync(0xFFFFFFFF, tile.local, from);
    tile.rows = __shfl_sync(0xFFFFFFFF, tile.rows, from);
    tile.expert = __shfl_sync(0xFFFFFFFF, tile.expert, from);
    return tile;
  }
};

// A team's first tile. Blocks of one team without a tile should be those that share an SM with more blocks than others
// do. These are the first, which come to an SM that other kernels left free, and the very last.
__device__ __forceinline__ int first_tile(int team) {
  if (TEAMS > 1) return team * gridDim.x + blockIdx.x;
  const int before = gridDim.x - 1 - blockIdx.x, last = gridDim.x / 48;
  return before < last ? before + gridDim.x - last : before - last;
}

// Where the raw tokens lie.
struct Rows {
  const u8* numbers;
  const u8* scales;
  const int* index;
  const int* group_scale_offsets;
  int scale_ld;
  long long bytes;
};

// The tokens of a tile in shared memory, by rows of `held` units: in bf16, in the order of the columns.
struct OwnTokens {
  static constexpr int AHEAD = 2;  // pieces that a thread loads before it dequantizes the first
  const Rows& rows;
  const Tile& tile;
  u32 at;
  int units, held, stride;
  long long source;  // of the row that is this lane's
  int group_scale_offset;

  __device__ __forceinline__ OwnTokens(const Rows& rows, const Tile& tile, u32 at, int units)
      : rows(rows), tile(tile), at(at), units(units) {
    // 16 bytes between rows, so that they start in different banks.
    held = tile.rows == 1 ? units : min(units, (OWN_BYTES / tile.rows - 16) / (128 * STAGE_K64) * STAGE_K64);
    stride = held * 128 + 16;
    source = tile.start + tile.local + min(static_cast<int>(threadIdx.x & 31), tile.rows - 1);
    if (rows.index) source = rows.index[source];
    group_scale_offset = GROUP_SCALES ? rows.group_scale_offsets[tile.group] : 0;
  }

  // Dequantizes units `from` to `end`. For all consumers together, of which none still reads what was there before.
  __device__ __forceinline__ void fill(int from, int end) {
#pragma unroll 1
    for (int row = 0; row < tile.rows; ++row) {
      const RowPlace place = place_of_row(__shfl_sync(0xFFFFFFFF, source, row), tile.start, tile.local + row,
                                          group_scale_offset, rows.scale_ld, rows.bytes, units * 64);
#pragma unroll 1
      for (int begin = from * 4 + place_in_team(); begin < end * 4; begin += AHEAD * CONSUMERS) {
        Piece pieces[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
          const int piece = begin + i * CONSUMERS, v = piece * 16 / SCALE_BLOCK;
          if (piece >= end * 4) break;
          pieces[i].load(rows.numbers + place.numbers + piece * (2 * NUMBER_BITS));
          pieces[i].load_scale(rows.scales + place.scales, place.of_four, v);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
          const int piece = begin + i * CONSUMERS;
          if (piece >= end * 4) break;
          u32 pairs[8];
          pieces[i].dequantize(pairs);
          const u32 to = at + row * stride + (piece - from * 4) * 32;
          store_16(to, pairs), store_16(to + 16, pairs + 4);
        }
      }
    }
    meet();
  }

  // The B operands of a lane: 16 columns of a token, in the unit `behind` the first that is held. Lanes whose token
  // does not exist take another's; nobody reads their sums.
  __device__ __forceinline__ void load(int behind, u32 (&tokens)[8]) const {
    const int lane = threadIdx.x & 31;
    const u32 from = at + min(lane / 4, tile.rows - 1) * stride + behind * 128 + lane % 4 * 32;
    const uint4 low = load_16(from), high = load_16(from + 16);
    tokens[0] = low.x, tokens[1] = low.y, tokens[2] = low.z, tokens[3] = low.w;
    tokens[4] = high.x, tokens[5] = high.y, tokens[6] = high.z, tokens[7] = high.w;
  }
};

// The ring of stages, as a warp sees it: which stage is next. Barriers of full and empty stages, of announced tiles,
// and of the end of the kernel before follow one another.
struct Ring {
  u32 stages, full;
  int stage = 0;
  u32 parity = 0;

  __device__ __forceinline__ u32 at() const { return stages + stage * STAGE_BYTES; }
  __device__ __forceinline__ void await_full() const { barrier_wait(full + stage * 8, parity); }
  __device__ __forceinline__ void await_empty() const { barrier_wait(empty(stage), parity ^ 1); }
  __device__ __forceinline__ u32 empty(int stage) const { return full + (STAGES + stage) * 8; }
  __device__ __forceinline__ u32 ended() const { return full + (2 * STAGES + TILES_AHEAD) * 8; }
  __device__ __forceinline__ u32 announced(int count) const { return full + (2 * STAGES + count % TILES_AHEAD) * 8; }
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// Adds the products of `units` units of a tile to the sums of 16 weight rows, in the order of dequant_gemm.cu. The
// numbers of a unit are loaded while the unit before is multiplied. `load_tokens(unit, part, tokens)` gives the B
// operands of a lane.
template <bool SPECIAL_VALUES, class LoadTokens>
__device__ __forceinline__ void multiply(Ring& ring, int units, float (&acc)[4], LoadTokens load_tokens) {
  const int place = place_in_team(), quants = place * 16,
            scales = QUANT_BYTES + (W_FMT == NVFP4 ? place * 2 : place / 2 * 2);
  Unit<SPECIAL_VALUES> ahead;
  u16 ahead_scales;
  u32 ahead_tokens[8];
  auto load = [&](int k64, int part) {
    const u32 at = ring.at() + part * UNIT_BYTES;
    ahead_scales = ahead.fetch(at + quants, at + scales);
    load_tokens(k64, part, ahead_tokens);
  };
  ring.await_full();
  load(0, 0);
#pragma unroll 1
  for (int k64 = 0; k64 < units; k64 += STAGE_K64) {
#pragma unroll
    for (int part = 0; part < STAGE_K64; ++part) {
      Unit<SPECIAL_VALUES> unit = ahead;
      unit.prepare(ahead_scales);
      u32 tokens[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) tokens[i] = ahead_tokens[i];
      auto step = [&](int number) {
        u32 a[4];
        unit.dequantize(number, a);
        warp_product(acc, a, tokens[2 * number], tokens[2 * number + 1]);
      };
      step(0);
      step(1);
      if (part + 1 < STAGE_K64) {
        load(k64, part + 1);
      } else {
        barrier_arrive_warp(ring.empty(ring.stage));
        ring.advance();
        if (k64 + STAGE_K64 < units) {
          ring.await_full();
          load(k64 + STAGE_K64, 0);
        }
      }
      step(2);
      step(3);
    }
  }
}

// Afterwards the kernel that reads the results may start, since all kernels before this one have ended: a GEMM finds
// the groups and loads its first weights meanwhile, a combine the routing of its tokens.
__device__ __forceinline__ void await_kernels_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
}

extern "C" __global__ void __launch_bounds__(TEAMS*(CONSUMERS + 32), BLOCKS_PER_SM)
    dequant_few(const u8* tokens, const u8* weights, const float* row_scale, const float* expert_scales,
                const float* bias, const int* group_offsets, const int* expert_ids, const int* num_active, void* out,
                u8* out_scales, const float* out_gsf, float* out_row_scale, const int* out_scale_offsets,
                int num_groups, int num_experts, int capacity, int columns, int units, int unit_rows, int token_blocks,
                long long out_stride, int scales_per_expert, int gate_up_order, const u8* special_values,
                const u8* token_scales, const int* row_index, const int* group_scale_offsets, int token_scale_ld,
                long long row_bytes, const void* topk_idx, const float* route_weights, int num_ids, int id_bytes,
                int first_id, int loads_after_ns) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(8) u64 barriers[TEAMS][2 * STAGES + TILES_AHEAD + 1];
  __shared__ __align__(16) float turned[TEAMS][ACTIVATED ? TILE_TOKENS : 1][TURNED_COLUMNS];
  __shared__ TileScales scales[TEAMS];
  __shared__ Requantization with;
  __shared__ Tile tiles[TEAMS][TILES_AHEAD];
  // An announcement overwrites the one of TILES_AHEAD tiles ago. That is safe: a warp that still reads it holds the
  // stages of the later tiles.
  static_assert(TILES_AHEAD >= STAGES + 2, "tiles that a team may be ahead");
  const bool consumes = threadIdx.x < TEAMS * CONSUMERS;
  const int team = TEAMS == 1 ? 0 : consumes ? team_of_consumer() : (threadIdx.x - TEAMS * CONSUMERS) / 32;
  Ring ring = {shared_address(memory) + team * TEAM_BYTES, shared_address(barriers[team])};
  // Keeps the addresses in registers; otherwise they are computed in every step.
  asm("" : "+r"(ring.stages), "+r"(ring.full));
  if (consumes && place_in_team() == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(ring.full + s * 8, 1);
      barrier_init(ring.empty(s), 4 * ARRIVALS_OF_WARP);
    }
    for (int s = 0; s < TILES_AHEAD; ++s) barrier_init(ring.announced(s), 1);
    barrier_init(ring.ended(), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  // What the groups are is known when the kernel that dispatches the tokens has ended: the one before this, or one
  // before that, which had ended when the one before this let this one start. Their ids were known before it began.
  const RoutedIds ids = {topk_idx, route_weights, num_ids, id_bytes, first_id};
  if (!CHAINED && !(ids.given() && !consumes)) await_kernels_before();

  if (!consumes) {
    const int lane = threadIdx.x & 31;
    if (num_active) num_groups = min(num_groups, max(__ldcg(num_active), 0));
    Tiles of_all;
    of_all.read(group_offsets, ids, expert_ids, num_groups, num_experts, capacity, unit_rows);
    int number = first_tile(team);
    for (int count = 0;; ++count, number += TEAMS * gridDim.x) {
      const Tile tile = of_all.find(number, num_experts, unit_rows);
      if (lane == 0) {
        tiles[team][count % TILES_AHEAD] = tile;
        barrier_arrive(ring.announced(count));
      }
      if (tile.rows == 0) break;
      const u8* w =
          weights + (static_cast<long long>(tile.expert) * units * unit_rows + tile.unit * CHUNK) * UNIT_BYTES;
      // Of the other lanes some could wait for a stage that is filled again before they look.
      if (lane != 0) continue;
      const u64 of_weights = KEEP_TOKENS ? policy_of_first_out() : 0;
      if (CHAINED && count == 0 && loads_after_ns > 0) barrier_wait_for(ring.ended(), 0, loads_after_ns);
#pragma unroll 1
      for (int k64 = 0; k64 < units; k64 += STAGE_K64, ring.advance()) {
        ring.await_empty();
        const u32 full = ring.full + ring.stage * 8;
        barrier_expect(full, STAGE_BYTES);
        for (int part = 0; part < STAGE_K64; part += CHUNK) {
          const u32 to = ring.at() + part * UNIT_BYTES;
          const u8* from = w + static_cast<long long>(k64 + part) * unit_rows * UNIT_BYTES;
          if (KEEP_TOKENS) bulk_load(to, from, CHUNK * UNIT_BYTES, full, of_weights);
          else bulk_load(to, from, CHUNK * UNIT_BYTES, full);
        }
      }
    }
    return;
  }

  const Problem p = {tokens,       weights,    row_scale,         expert_scales, bias,
                     out,          out_scales, out_scale_offsets, columns,       GATED ? 2 * columns : columns,
                     units,        unit_rows,  token_blocks,      out_stride,    scales_per_expert,
                     gate_up_order};
  const Rows rows = {tokens, token_scales, row_index, group_scale_offsets, token_scale_ld, row_bytes};
  auto begin = [&] {
    // The previous kernel may write the scales of the rows.
    if (CHAINED) await_kernels_before();
    if (ACTIVATED && OUT_FMT == NVFP4) {
      const float gsf = clamped(*out_gsf), scale = __frcp_rn(gsf);
      with.gsf = gsf;
      if (team == 0) with.prepare(gsf, threadIdx.x);
      meet_all();
      constexpr int ALL = TEAMS * CONSUMERS;
      for (int i = blockIdx.x * ALL + threadIdx.x; i < capacity; i += gridDim.x * ALL) out_row_scale[i] = scale;
    }
  };
  if (!CHAINED) begin();
  for (int count = 0;; ++count) {
    barrier_wait(ring.announced(count), count / TILES_AHEAD & 1);
    const Tile tile = tiles[team][count % TILES_AHEAD];
    u32 special_value = 0;
    if (W_FMT != NVFP4 && tile.rows > 0) {
      special_value = special_values[static_cast<long long>(tile.expert) * unit_rows + tile.unit];
    }
    if (CHAINED && count == 0) {
      begin();
      if (place_in_team() == 0) barrier_arrive(ring.ended());
    }
    if (tile.rows == 0) break;
    scales[team].copy<true>(p, tile);
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const bool special = W_FMT != NVFP4 && special_value;
    OwnTokens own(rows, tile, ring.stages + STAGES * STAGE_BYTES, units);
    for (int from = 0; from < units; from += own.held) {
      const int end = min(from + own.held, units);
      if (from > 0) meet();  // all have read the tokens before
      own.fill(from, end);
      auto load = [&](int k64, int part, u32(&tokens)[8]) { own.load(k64 + part, tokens); };
      if (special) multiply<true>(ring, end - from, acc, load);
      else multiply<false>(ring, end - from, acc, load);
    }
    finish<1>(p, tile, scales[team], with, team, tile.unit, acc, turned[team]);
  }
}
