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

#define IN_REGISTERS (EXPAND && !AHEAD && !PACKED)  // packed weights, which threads load that expand them

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

// Where units of a tile are, and how many: two neighbours, or, of NARROW tiles, of gate and up.
struct Units {
  const u8* unit;
  u32 stride;  // bytes to the other one
  int count;

  // Those of `number` units from the `first` of the tile, from the first block of K on: both, or none.
  __device__ __forceinline__ void find(const u8* units, const Tile& tile, int columns, int k_blocks, int first,
                                       int number) {
    int blocks = 2 * ceil_div(columns, 2 * UNIT_ROWS);
    count = number;
    stride = (NARROW && GATED ? blocks : 1) * k_blocks * UNIT_BYTES;
    int part = GATED && !NARROW ? first / 2 : 0, of_part = GATED && !NARROW ? first % 2 : first;
    unit = unit_at(units, tile.expert, part, tile.column / UNIT_ROWS + of_part, columns, k_blocks);
  }

  __device__ __forceinline__ const u8* from(int u) const { return unit + u * stride; }

  // Goes on to a later block of K.
  __device__ __forceinline__ void advance(int blocks = 1) { unit += blocks * UNIT_BYTES; }
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

// Where a warpgroup that expands, or who loads for it, is in its half of the ring of packed weights: each second stage.
struct PackedRing {
  int stage;
  u32 phase = 0;

  __device__ __forceinline__ explicit PackedRing(int first) : stage(first) {}

  __device__ __forceinline__ u32 units(const Block& block) const { return block.packed + stage * UNITS * UNIT_BYTES; }
  __device__ __forceinline__ u32 full(const Block& block) const { return block.packed_full + 8 * stage; }
  __device__ __forceinline__ u32 empty(const Block& block) const { return full(block) + 8 * PACKED; }
  __device__ __forceinline__ void await_free(const Block& block) const { barrier_wait(empty(block), ~phase & 1); }

  __device__ __forceinline__ void advance() {
    stage += 2;
    if (stage >= PACKED) stage -= PACKED, phase = ~phase;
  }

  __device__ __forceinline__ void swap(PackedRing& other) {
    PackedRing here = *this;
    *this = other, other = here;
  }
};

#endif

// What a thread expands: two units of a block of K. Each of two warpgroups expands two of the four units, the second
// none of a tile of one half. IN_TURNS, they expand both units of a stage, and take turns at stages.
struct Expander : Weights {
  static constexpr int STEP = IN_TURNS ? 2 : 1;  // from one of its blocks of K to the next

  Unit own[2];
#if PACKED
  const Block& block;
  PackedRing ring;
#else
  Units source;
  int first;  // of the units that it expands
#endif

  // Entries are looked up while the word before is expanded; those of all words would take too many registers.
  __device__ __forceinline__ void expand_units(u32 b) const {
    Entries found = own[0].look_up(table, 0);
#pragma unroll
    for (int i = 0; i < 2 * UNIT_WORDS; ++i) {
      Entries of_word = found;
      int after = i + 1, u = i / UNIT_WORDS;
      if (after < 2 * UNIT_WORDS) found = own[after / UNIT_WORDS].look_up(table, after % UNIT_WORDS);
      Weights::expand(own[u], i % UNIT_WORDS, of_word, b + u * UNIT_EXPANDED);
    }
  }

#if PACKED

  __device__ __forceinline__ Expander(const Block& block, const u8* units, int columns, int k_blocks)
      : Weights(block, units, columns, k_blocks), block(block), ring(block.wg - MATH_WGS - 1) {}

  __device__ __forceinline__ void begin(const Tile&, int, int) {}

  // Writes the weights of a stage to `b`, and arrives at `ready`.
  __device__ __forceinline__ void expand(u32 b, u32 ready, int) {
    barrier_wait(ring.full(block), ring.phase & 1);
    u32 packed = ring.units(block), thread = threadIdx.x % 128;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      u32 from = packed + u * UNIT_BYTES, scales = from + UNIT_QUANTS + thread * SCALE_BYTES_OF_THREAD;
#pragma unroll
      for (int j = 0; j < UNIT_WORDS; ++j) {
        uint4& word = own[u].words[j];
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                     : "r"(from + thread * 16 + j * 2048));
      }
      if (SCALES_OF_WORD == 2) {
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(own[u].scales) : "r"(scales));
      } else {
        u16 both;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(both) : "r"(scales));
        own[u].scales = both;
      }
    }
    expand_units(b);
    arrive(ready);
    barrier_arrive_warp(ring.empty(block));
    ring.advance();
  }

#else  // from registers

  __device__ __forceinline__ Expander(const Block& block, const u8* units, int columns, int k_blocks)
      : Weights(block, units, columns, k_blocks), first(IN_TURNS ? 0 : 2 * (block.wg - MATH_WGS)) {}

  // Loads the next block of K.
  __device__ __forceinline__ void load_next() {
    int thread = threadIdx.x % 128;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const u8* from = source.from(u);
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
    source.advance(STEP);
  }

  // Asks L2 for `blocks` blocks of K, `ahead` behind the next to be loaded.
  __device__ __forceinline__ void prefetch(int ahead, int blocks) const {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source.from(u) + ahead * UNIT_BYTES),
                   "r"(blocks * UNIT_BYTES)
                   : "memory");
    }
  }

  // Loads the first block of K of a tile, number `kb`.
  __device__ __forceinline__ void begin(const Tile& tile, int halves, int kb = 0) {
    bool some = IN_TURNS ? kb < k_blocks : first < 2 * halves;
    source.find(units, tile, columns, k_blocks, first, some ? 2 : 0);
    if (source.count == 0) return;
    if (kb > 0) source.advance(kb);
    int after = k_blocks - 1 - kb;
    if (threadIdx.x % 128 == 0 && after > 0) prefetch(1, min(PREFETCHED, after));
    load_next();
  }

  // Writes the weights of a stage to `b`, arrives at `ready`, and loads the next block of K if one of the `left` is for
  // this warpgroup. The fence would wait for that load, too.
  __device__ __forceinline__ void expand(u32 b, u32 ready, int left) {
    if (source.count > 0) {
      if (threadIdx.x % 128 == 0 && left > PREFETCHED) prefetch(PREFETCHED + 1 - STEP, 1);
      expand_units(b + first * UNIT_EXPANDED);
    }
    arrive(ready);
    if (source.count > 0 && left >= STEP) load_next();
  }

#endif
};

#endif

#endif

#endif
