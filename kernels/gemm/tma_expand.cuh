// Four-bit weights that become e4m3, for inclusion by tma_gemm.cu. Here the threads that produce expand a block of K of
// a tile in shared memory while others are on their way; tma_ahead.cuh expands in memory, before tiles need the
// weights.
//
// Macros: EXPAND (weights along K that share a block scale, 16 of `nvfp4` or 32 of `mxfp4`; 0 if weights are stored as
// they are multiplied), PACKED (stages of a ring of packed weights in shared memory), AHEAD (1: weights are expanded in
// memory). With neither, threads load packed weights into registers. `expanded_weights.py` makes the units that are
// read here: 64 weight rows times 128 columns of K, then their scale codes. A unit has 256 words of 16 bytes, of 32
// weights each; word `32 * group + 8 * span + row` is of row `8 * group + row` and of columns `32 * span` and on. So a
// warp loads 512 contiguous bytes, and 8 lanes store to all banks.
//
// A scale code has the upper bits but the sign of an fp16 number, by which the e2m1 magnitudes are multiplied: 5 of
// exponent, and of mantissa 3 for `nvfp4`, 1 for `mxfp4`. The products are rounded to e4m3. A table has the 8 products
// of each code as 8 bytes.

#ifndef MOE_RUNTIME_TMA_EXPAND
#define MOE_RUNTIME_TMA_EXPAND

#include "tma_block.cuh"

#if EXPAND

constexpr int UNIT_WORDS = 2;                                       // of a thread
constexpr int SCALE_BYTES_OF_THREAD = UNIT_WORDS * SCALES_OF_WORD;  // in a unit
constexpr int CODE_SHIFT = SCALES_OF_WORD == 2 ? 7 : 9;             // from scale codes to fp16
constexpr int PREFETCHED = 4;                                       // blocks of K that L2 is asked for in advance

__device__ __forceinline__ u32 e4m3_codes(float low, float high) {
  u16 codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

// The products of a scale code with 0, 0.5, 1, 1.5, 2, 3, 4, 6 as e4m3.
__device__ __forceinline__ uint2 products_of(u32 code) {
  u32 half = code << CODE_SHIFT;  // as fp16
  float scale = __uint_as_float(half < 1 << 10 ? 0 : half >= 31 << 10 ? 0x7FC00000 : (half + (112 << 10)) << 13);
  return make_uint2(e4m3_codes(0.0f * scale, 0.5f * scale) | e4m3_codes(scale, 1.5f * scale) << 16,
                    e4m3_codes(2.0f * scale, 3.0f * scale) | e4m3_codes(4.0f * scale, 6.0f * scale) << 16);
}

// Called by the whole block, which must synchronize before the table is used.
__device__ __forceinline__ void fill_table(uint2* table) {
  for (int code = threadIdx.x; code < TABLE_BYTES / 8; code += THREADS) table[code] = products_of(code);
}

// Bytes of `low` and `high` by the four lower nibbles of `selector`. The compiler looks into an intrinsic, and would
// split the mask that two of these share.
__device__ __forceinline__ u32 selected_bytes(u32 low, u32 high, u32 selector) {
  u32 bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}

// The products of the code that is byte `i` of `codes`.
__device__ __forceinline__ uint2 entry(u32 table, u32 codes, int i) {
  u32 code = selected_bytes(codes, 0, 0x4440 + i);
  uint2 found;
  asm("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(found.x), "=r"(found.y) : "r"(table + code * 8));
  return found;
}

// 8 weights: bits 4i .. 4i + 2 of the word are the magnitude of weight i; its sign is at bit 8i + 7 of the first 4, and
// at bit 8i - 29 of the last.
__device__ __forceinline__ void expand_8(u32 word, uint2 table, u32& first, u32& last) {
  u32 magnitudes = word & 0x77777777;
  first = selected_bytes(table.x, table.y, magnitudes) | (word & 0x80808080);
  last = selected_bytes(table.x, table.y, magnitudes >> 16) | (word << 4 & 0x80808080);
}

__device__ __forceinline__ void store_16(u32 to, u32 x, u32 y, u32 z, u32 w) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// 32 weights with the entries of the first and of the last 16, which go to `first` and `last`.
__device__ __forceinline__ void expand_word(uint4 word, uint2 table, uint2 next_table, u32 first, u32 last) {
  u32 x, y, z, w;
  expand_8(word.x, table, x, y), expand_8(word.y, table, z, w);
  store_16(first, x, y, z, w);
  expand_8(word.z, next_table, x, y), expand_8(word.w, next_table, z, w);
  store_16(last, x, y, z, w);
}

// Of the table: those of the first and of the last 16 weights of a word.
struct Entries {
  uint2 first, last;
};

// What a thread has of the 64 x 128 weights of a unit: two words and their scale codes.
struct Unit {
  uint4 words[UNIT_WORDS];
  u32 scales;

  __device__ __forceinline__ Entries look_up(u32 table, int j) const {
    uint2 first = entry(table, scales, SCALES_OF_WORD * j);
    return {first, SCALES_OF_WORD > 1 ? entry(table, scales, SCALES_OF_WORD * j + 1) : first};
  }
};

// Where the unit of `block` of a part of an expert's weights begins. Past the last column any unit will do.
__device__ __forceinline__ const u8* unit_at(const u8* units, int expert, int part, int block, int columns,
                                             int k_blocks) {
  int blocks = 2 * ceil_div(columns, 2 * UNIT_ROWS);
  long long unit = ((long long)expert * (GATED ? 2 : 1) + part) * blocks + (block < blocks ? block : 0);
  return units + unit * k_blocks * UNIT_BYTES;
}

#if !AHEAD

// Where units of a tile are, and how many: pairs of neighbours, or, of NARROW tiles, of gate and up.
struct Units {
  static constexpr int PAIRS = PACKED ? UNITS / 2 : 1;
  const u8* pairs[PAIRS];
  u32 stride;  // bytes between the units of a pair
  int count;

  // Those of `number` units from the `first` of the tile, from the first block of K on: whole pairs, or one unit.
  __device__ __forceinline__ void find(const u8* units, const Tile& tile, int columns, int k_blocks, int first,
                                       int number) {
    int blocks = 2 * ceil_div(columns, 2 * UNIT_ROWS);
    count = number;
    stride = (NARROW && GATED ? blocks : 1) * k_blocks * UNIT_BYTES;
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
      int u = first + 2 * p, part = GATED && !NARROW ? u / 2 : 0, of_part = GATED && !NARROW ? u % 2 : u;
      pairs[p] = unit_at(units, tile.expert, part, tile.column / UNIT_ROWS + of_part, columns, k_blocks);
    }
  }

  __device__ __forceinline__ const u8* from(int u) const { return pairs[u / 2] + u % 2 * stride; }

  // Goes on to a later block of K.
  __device__ __forceinline__ void advance(int pair, int blocks = 1) { pairs[pair] += blocks * UNIT_BYTES; }
};

// What the threads that produce know of the weights.
struct Weights {
  const u8* units;
  int columns, k_blocks;
  u32 table;     // shared-memory address
  u32 to, next;  // of the first word of a thread, from the weights of a stage

  __device__ __forceinline__ Weights(const Block& block, const u8* units, int columns, int k_blocks)
      : units(units), columns(columns), k_blocks(k_blocks), table(shared_address(block.table)) {
    int warp = threadIdx.x / 32 % 4, row = threadIdx.x % 8, span = threadIdx.x % 32 / 8;
    to = (8 * warp + row) * 128 + ((2 * span ^ row) << 4), next = to ^ 16;
  }

  // Word `j` of a unit that begins at `b`, with its entries of the table.
  __device__ __forceinline__ void expand(const Unit& unit, int j, const Entries& found, u32 b) const {
    expand_word(unit.words[j], found.first, found.last, b + j * 4096 + to, b + j * 4096 + next);
  }

  // All weights of a stage are written.
  __device__ __forceinline__ static void arrive(u32 ready) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    barrier_arrive_warp(ready);
  }
};

#if PACKED

// A ring of packed weights, which the warp of the leader fills across tiles by a walk of its own.
struct Expander : Weights {
  u32 ring, full;                       // shared-memory addresses; barriers that a stage may be filled follow
  int slot = 0, filled = 0, ahead = 0;  // what is read and filled next; stages that are filled or under way
  u32 phase = 0, of_filled = 0;
  Units loads;  // of the tile that is being loaded
  int left = 0, number, group = 0, count;
  bool more;

  __device__ __forceinline__ Expander(const Block& block, const u8* units, int columns, int k_blocks)
      : Weights(block, units, columns, k_blocks),
        ring(block.packed),
        full(block.packed_full),
        number(blockIdx.x / CLUSTER),
        more(threadIdx.x / 32 % 4 == 0) {}

  __device__ __forceinline__ void begin(const Tile&, int halves) { count = FEW ? UNITS : 2 * halves; }

  __device__ __forceinline__ static bool of_loading(int) { return true; }

  // Asks for weights until `most` stages are there or under way. Called by whole warps; one of them does it.
  template <class Walk>
  __device__ __forceinline__ void load(int most, const Walk& walk) {
    for (; more && ahead < most; ++ahead) {
      if (left == 0) {
        Tile tile;
        int halves;
        more = walk.find(number, group, tile, halves);
        if (!more) return;
        number += walk.step;
        loads.find(units, tile, columns, k_blocks, 0, FEW ? UNITS : 2 * halves);
        left = k_blocks;
      }
      barrier_wait(full + 8 * (PACKED + filled), ~of_filled & 1);
      __syncwarp();
      u32 to = ring + filled * UNITS * UNIT_BYTES, ready = full + 8 * filled;
      bool one = elected();
      if (one) barrier_expect(ready, loads.count * UNIT_BYTES);
#pragma unroll
      for (int u = 0; u < UNITS; ++u) {
        if (u >= loads.count) continue;
        if (one) bulk_load(to + u * UNIT_BYTES, loads.from(u), UNIT_BYTES, ready);
        if (u % 2) loads.advance(u / 2);
      }
      --left;
      if (++filled == PACKED) filled = 0, of_filled = ~of_filled;
    }
  }

  // Writes the weights of a stage to `b` and arrives at `ready`.
  __device__ __forceinline__ void expand(u32 b, u32 ready, int) {
    int thread = threadIdx.x % 128;
    barrier_wait(full + 8 * slot, phase & 1);
    u32 words = ring + slot * UNITS * UNIT_BYTES + thread * 16;
    u32 scales = ring + slot * UNITS * UNIT_BYTES + UNIT_QUANTS + thread * SCALE_BYTES_OF_THREAD;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      if (u >= count) continue;
      Unit unit;
#pragma unroll
      for (int j = 0; j < UNIT_WORDS; ++j) {
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(unit.words[j].x), "=r"(unit.words[j].y), "=r"(unit.words[j].z), "=r"(unit.words[j].w)
                     : "r"(words + u * UNIT_BYTES + j * 2048));
      }
      if (SCALES_OF_WORD == 2) {
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(unit.scales) : "r"(scales + u * UNIT_BYTES));
      } else {
        u16 both;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(both) : "r"(scales + u * UNIT_BYTES));
        unit.scales = both;
      }
#pragma unroll
      for (int j = 0; j < UNIT_WORDS; ++j) Weights::expand(unit, j, unit.look_up(table, j), b + u * UNIT_EXPANDED);
    }
    arrive(ready);
    barrier_arrive_warp(full + 8 * (PACKED + slot));
    --ahead;
    if (++slot == PACKED) slot = 0, phase = ~phase;
  }
};

#else  // from registers

// What a thread has of a block of K, and where the next is. Each of two warpgroups expands two of the four units, the
// second none of a tile of one half. IN_TURNS, they expand both units of a stage, and take turns at stages. DEEP, each
// expands one of both units, and has two blocks of K in its two units.
struct Expander : Weights {
  Units source;
  Unit own[2];
  int first;  // of the units that it expands

  static constexpr int STEP = IN_TURNS ? 2 : 1;  // from one of its blocks of K to the next

  __device__ __forceinline__ Expander(const Block& block, const u8* units, int columns, int k_blocks)
      : Weights(block, units, columns, k_blocks), first(IN_TURNS ? 0 : (DEEP ? 1 : 2) * (block.wg - MATH_WGS)) {}

  template <class Walk>
  __device__ __forceinline__ void load(int, const Walk&) {}

  // Whether the warpgroup that loads, too, expands this block of K.
  __device__ __forceinline__ static bool of_loading(int kb) { return !IN_TURNS || kb % 2 == 0; }

  // Loads the next block of K, if DEEP into unit `only`.
  __device__ __forceinline__ void load_next(int only = 0) {
    int thread = threadIdx.x % 128;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      if (DEEP && u != only) continue;
      const u8* from = source.from(DEEP ? 0 : u);
#pragma unroll
      for (int j = 0; j < UNIT_WORDS; ++j) {
        uint4& word = own[u].words[j];
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                     : "l"(from + thread * 16 + j * 2048));
      }
      const u8* scales = from + UNIT_QUANTS + thread * SCALE_BYTES_OF_THREAD;
      own[u].scales = SCALES_OF_WORD == 2 ? *(const u32*)scales : *(const u16*)scales;
    }
    source.advance(0, STEP);
  }

  // Asks L2 for `blocks` blocks of K, `ahead` behind the next to be loaded.
  __device__ __forceinline__ void prefetch(int ahead, int blocks) const {
#pragma unroll
    for (int u = 0; u < (DEEP ? 1 : 2); ++u) {
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source.from(u) + ahead * UNIT_BYTES),
                   "r"(blocks * UNIT_BYTES)
                   : "memory");
    }
  }

  // Loads the first block of K of a tile, number `kb`.
  __device__ __forceinline__ void begin(const Tile& tile, int halves, int kb = 0) {
    if (TALL) source.find(units, tile, columns, k_blocks, 0, kb < k_blocks ? 2 : 0);
    else source.find(units, tile, columns, k_blocks, first, first < 2 * halves ? 2 : 0);
    if (source.count == 0) return;
    if (kb > 0) source.advance(0, kb);
    if (DEEP) {
      if (first > 0) source.pairs[0] += source.stride;
      if (threadIdx.x % 128 == 0 && k_blocks > 2) prefetch(2, min(PREFETCHED, k_blocks - 2));
      load_next(0);
      if (k_blocks > 1) load_next(1);
      return;
    }
    if (threadIdx.x % 128 == 0 && k_blocks > 1) prefetch(1, min(PREFETCHED, k_blocks - 1));
    load_next();
  }

  // Writes the weights of a stage to `b`, arrives at `ready`, and loads the next block of K if one of the `left` is for
  // this warpgroup. The fence would wait for that load, too.
  __device__ __forceinline__ void expand(u32 b, u32 ready, int left) {
    if (DEEP) {
      if (threadIdx.x % 128 == 0 && left > PREFETCHED + 1) prefetch(PREFETCHED, 1);
      if ((k_blocks - 1 - left) % 2 == 0) expand_deep(0, b, ready, left);
      else expand_deep(1, b, ready, left);
      return;
    }
    if (source.count > 0) {
      if (threadIdx.x % 128 == 0 && left > PREFETCHED) prefetch(PREFETCHED + 1 - STEP, 1);
      // Entries are looked up while the word before is expanded; those of all words would take too many registers.
      Entries found = own[0].look_up(table, 0);
#pragma unroll
      for (int i = 0; i < 2 * UNIT_WORDS; ++i) {
        Entries of_word = found;
        int after = i + 1, u = i / UNIT_WORDS;
        if (after < 2 * UNIT_WORDS) found = own[after / UNIT_WORDS].look_up(table, after % UNIT_WORDS);
        Weights::expand(own[u], i % UNIT_WORDS, of_word, b + (first + u) * UNIT_EXPANDED);
      }
    }
    arrive(ready);
    if (source.count > 0 && left >= STEP) load_next();
  }

  // The same from `unit`, into which it loads the block of K after the next.
  __device__ __forceinline__ void expand_deep(int unit, u32 b, u32 ready, int left) {
    Entries found = own[unit].look_up(table, 0), next_found = own[unit].look_up(table, 1);
    Weights::expand(own[unit], 0, found, b + first * UNIT_EXPANDED);
    Weights::expand(own[unit], 1, next_found, b + first * UNIT_EXPANDED);
    arrive(ready);
    if (left > 1) load_next(unit);
  }
};

#endif

#endif

#endif

#endif
