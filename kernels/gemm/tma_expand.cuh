// Four-bit weights that become e4m3 in shared memory, for inclusion by tma_gemm.cu. The threads that produce expand a
// block of K of a tile while others are on their way.
//
// Macros: EXPAND (weights along K that share a block scale, 16 of `nvfp4` or 32 of `mxfp4`; 0 if weights are stored as
// they are multiplied), PACKED (stages of a ring of packed weights in shared memory; 0 if threads load them into
// registers). `expanded_weights.py` makes the units that are read here: 64 weight rows times 128 columns of K, then
// their scale codes. A unit has 256 words of 16 bytes, of 32 weights each; word `32 * group + 8 * span + row` is of row
// `8 * group + row` and of columns `32 * span` and on. So a warp loads 512 contiguous bytes, and 8 lanes store to all
// banks.
//
// A scale code has the upper bits but the sign of an fp16 number, by which the e2m1 magnitudes are multiplied: 5 of
// exponent, and of mantissa 3 for `nvfp4`, 1 for `mxfp4`. The products are rounded to e4m3. A table has the 8 products
// of each code as 8 bytes. With COMPUTED a thread makes them anew for each 16 or 32 weights: 8 more instructions, and
// no reads of shared memory.

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

// Where a thread writes: the first and the last 16 of 32 weights in the 128-byte swizzle, the same and the barrier in
// the other block.
struct Place {
  u32 to, next, there, next_there, ready;
  bool copies;

  __device__ __forceinline__ void store(u32 offset, bool second, u32 x, u32 y, u32 z, u32 w) const {
    store_16((second ? next : to) + offset, x, y, z, w);
#if SHARED > 1
    u32 at = (second ? next_there : there) + offset;
    if (!copies) return;
#if SHARED == 2
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(at),
                 "r"(x), "r"(y), "r"(z), "r"(w), "r"(ready)
                 : "memory");
#else
    asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
#endif
#endif
  }
};

// 32 weights with the entries of the first and of the last 16.
__device__ __forceinline__ void expand_word(uint4 word, uint2 table, uint2 next_table, const Place& place, u32 offset) {
  u32 x, y, z, w;
  expand_8(word.x, table, x, y), expand_8(word.y, table, z, w);
  place.store(offset, false, x, y, z, w);
  expand_8(word.z, next_table, x, y), expand_8(word.w, next_table, z, w);
  place.store(offset, true, x, y, z, w);
}

// Copies to the other block, whose barrier counts the bytes.
__device__ __forceinline__ void bulk_copy_there(u32 to, u32 from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// Arrives at a barrier of the other block when the stores before are there.
__device__ __forceinline__ void barrier_arrive_after_stores(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0], 1;" ::"r"(barrier) : "memory");
}

// The 64 x 128 weights of a unit to `to`, by 128 threads: the two words of each and their scale codes.
struct Unit {
  uint4 words[UNIT_WORDS];
  u32 scales;

#if COMPUTED
  __device__ __forceinline__ uint2 products(u32, int i) const {
    u32 scale = selected_bytes(scales, 0, 0x4440 + i) * (0x00010001 << CODE_SHIFT);
    auto two = [&](u32 magnitudes) {
      u32 pair;
      u16 codes;
      asm("mul.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(scale), "r"(magnitudes));
      asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(codes) : "r"(pair));
      return (u32)codes;
    };
    return make_uint2(two(0x38000000) | two(0x3E003C00) << 16, two(0x42004000) | two(0x46004400) << 16);
  }
#else
  __device__ __forceinline__ uint2 products(u32 table, int i) const {
    u32 code = selected_bytes(scales, 0, 0x4440 + i);
    uint2 found;
    asm("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(found.x), "=r"(found.y) : "r"(table + code * 8));
    return found;
  }
#endif

  __device__ __forceinline__ void expand(u32 table, u32 to, u32 next) const {
#pragma unroll
    for (int j = 0; j < UNIT_WORDS; ++j) {
      uint2 first = products(table, SCALES_OF_WORD * j);
      uint2 last = SCALES_OF_WORD > 1 ? products(table, SCALES_OF_WORD * j + 1) : first;
      expand_word(words[j], first, last, {to, next, 0, 0, 0, false}, j * 4096);
    }
  }
};

// Where units of a tile are, and how many: pairs of neighbours, or, with FEW, of gate and up.
struct Units {
  const u8* pairs[UNITS / 2];
  u32 stride;  // bytes between the units of a pair
  int count;

  // Those of `number` units from the `first` of the tile, from the first block of K on: whole pairs, or one unit. Past
  // the last column any unit will do.
  __device__ __forceinline__ void find(const u8* units, const Tile& tile, int columns, int k_blocks, int first,
                                       int number) {
    int blocks = 2 * ceil_div(columns, 2 * UNIT_ROWS);
    count = number;
    stride = (FEW && GATED ? blocks : 1) * k_blocks * UNIT_BYTES;
#pragma unroll
    for (int p = 0; p < UNITS / 2; ++p) {
      int u = first + 2 * p, part = GATED && !FEW ? u / 2 : 0, of_part = GATED && !FEW ? u % 2 : u;
      int block = tile.column / UNIT_ROWS + of_part;
      if (block >= blocks) block = 0;
      long long unit = ((long long)tile.expert * (GATED ? 2 : 1) + part) * blocks + block;
      pairs[p] = units + unit * k_blocks * UNIT_BYTES;
    }
  }

  __device__ __forceinline__ const u8* from(int u) const { return pairs[u / 2] + u % 2 * stride; }

  // Goes on to the next block of K.
  __device__ __forceinline__ void advance(int pair) { pairs[pair] += UNIT_BYTES; }
};

// Whether the blocks of a cluster expand weights of a tile for each other.
__device__ __forceinline__ bool is_shared(const Tile& tile, int halves) {
  return SHARED && tile.pair_rows && halves == 2;
}

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

  __device__ __forceinline__ void expand(const Unit& unit, u32 b, int u) const {
    b += u * UNIT_EXPANDED;
    unit.expand(table, b + to, b + next);
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
  __device__ __forceinline__ void expand(int, u32 b, u32 ready, int) {
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
      Weights::expand(unit, b, u);
    }
    arrive(ready);
    barrier_arrive_warp(full + 8 * (PACKED + slot));
    --ahead;
    if (++slot == PACKED) slot = 0, phase = ~phase;
  }
};

#else  // from registers

// What a thread has of one or two blocks of K, and where its next is. A tile's units are shared by the expanding
// warpgroups, and, if SHARED, by the blocks of a cluster that multiply with the same weights. A thread with at most two
// units of a block of K has loaded two blocks in advance, but for gathered rows, which need its registers.
struct Expander : Weights {
  Units source;
  Unit own[UNITS / EXPANDERS];
  int expander;  // number of this warpgroup
  int first;     // of the units of a block of K that it expands
  bool copies;   // to the other block

  __device__ __forceinline__ Expander(const Block& block, const u8* units, int columns, int k_blocks)
      : Weights(block, units, columns, k_blocks), expander(EXPANDERS > 1 ? block.wg - MATH_WGS : 0) {}

  template <class Walk>
  __device__ __forceinline__ void load(int, const Walk&) {}

  template <int SLOT>
  __device__ __forceinline__ void load_unit(int u) {
    int thread = threadIdx.x % 128;
    const u8* from = source.from(u);
#pragma unroll
    for (int j = 0; j < UNIT_WORDS; ++j) {
      uint4& word = own[SLOT].words[j];
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                   : "l"(from + thread * 16 + j * 2048));
    }
    const u8* scales = from + UNIT_QUANTS + thread * SCALE_BYTES_OF_THREAD;
    own[SLOT].scales = SCALES_OF_WORD == 2 ? *(const u32*)scales : *(const u16*)scales;
  }

  // The first two units of a block of K into two slots, or the last two of four.
  template <int SLOT>
  __device__ __forceinline__ void load_pair(int u) {
    load_unit<SLOT>(u), load_unit<SLOT + 1>(u + 1);
    source.advance(u / 2);
  }

  // Asks L2 for `blocks` blocks of K, `ahead` behind the next to be loaded.
  __device__ __forceinline__ void prefetch(int ahead, int blocks) const {
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      if (u >= source.count) continue;
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source.from(u) + ahead * UNIT_BYTES),
                   "r"(blocks * UNIT_BYTES)
                   : "memory");
    }
  }

  // Loads the first blocks of K of a tile.
  __device__ __forceinline__ void begin(const Tile& tile, int halves) {
    copies = is_shared(tile, halves);
    int all = 2 * halves, count = EXPANDERS > 1 ? (expander < halves ? 2 : 0) : copies ? all / 2 : all;
    first = EXPANDERS > 1 ? 2 * expander : copies ? 2 * cluster_rank() : 0;
    source.find(units, tile, columns, k_blocks, first, count);
    if (count == 0) return;
    if (threadIdx.x % 128 == 0 && k_blocks > 1) prefetch(1, min(PREFETCHED, k_blocks - 1));
    load_pair<0>(0);
#if EXPANDERS == 1
    if (count > 2) {
      load_pair<2>(2);
    } else if (K_BLOCKS_HELD > 1 && k_blocks > 1) {
      load_pair<2>(0);
    }
#endif
  }

  template <int SLOT>
  __device__ __forceinline__ void expand_pair(u32 b, u32 ready, int u) {
    uint2 found[2][UNIT_WORDS * SCALES_OF_WORD];
    auto look_up = [&](int i) {
#pragma unroll
      for (int j = 0; j < UNIT_WORDS * SCALES_OF_WORD; ++j) found[i][j] = own[SLOT + i].products(table, j);
    };
    u32 at = b + (first + u) * UNIT_EXPANDED;
    Place place = {at + to, at + next, 0, 0, 0, copies};
    if (SHARED > 1 && copies) {
      u32 change = address_at(at, cluster_rank() ^ 1) - at;
      place.there = place.to + change, place.next_there = place.next + change, place.ready = ready + change;
    }
    look_up(0);
    if (!SHARED && !GATHER) look_up(1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if ((SHARED || GATHER) && i == 1) look_up(1);
#pragma unroll
      for (int j = 0; j < UNIT_WORDS; ++j) {
        uint2 table = found[i][SCALES_OF_WORD * j], next_table = found[i][SCALES_OF_WORD * j + SCALES_OF_WORD - 1];
        expand_word(own[SLOT + i].words[j], table, next_table, place, i * UNIT_EXPANDED + j * 4096);
      }
    }
  }

  // Says that all weights of a stage are written, here and in the other block.
  __device__ __forceinline__ void finish(u32 b, u32 ready) {
    if (SHARED == 3 && copies) {
      asm volatile("fence.proxy.async;" ::: "memory");
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        barrier_arrive(ready);
        barrier_arrive_after_stores(address_at(ready, cluster_rank() ^ 1));
      }
      return;
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (SHARED == 1 && copies) {
      __syncwarp();
      if (elected()) {
        u32 from = b + first * UNIT_EXPANDED + threadIdx.x / 32 % 4 * 1024,
            change = address_at(b, cluster_rank() ^ 1) - b;
        for (int u = 0; u < source.count; ++u, from += UNIT_EXPANDED) {
          bulk_copy_there(from + change, from, 1024, ready + change);
          bulk_copy_there(from + 4096 + change, from + 4096, 1024, ready + change);
        }
      }
    }
    if (SHARED == 3) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(ready, 2);
    } else {
      barrier_arrive_warp(ready);
    }
  }

  // Writes the weights of a stage to `b`, arrives at `ready`, and loads a later block of K if one is `left`. `odd`, a
  // constant, is of the block of K. The fence waits for loads, too.
  __device__ __forceinline__ void expand(int odd, u32 b, u32 ready, int left) {
    bool deep = K_BLOCKS_HELD > 1 && source.count <= 2;
    if (threadIdx.x % 128 == 0 && left > PREFETCHED) prefetch(deep ? PREFETCHED - 1 : PREFETCHED, 1);
#if EXPANDERS == 1
    if (source.count > 2) {
      expand_pair<0>(b, ready, 0);
      if (left > 0) load_pair<0>(0);
      expand_pair<2>(b, ready, 2);
      finish(b, ready);
      if (left > 0) load_pair<2>(2);
    } else if (K_BLOCKS_HELD > 1 && odd) {
      expand_pair<2>(b, ready, 0);
      finish(b, ready);
      if (left > 1) load_pair<2>(0);
    } else {
      expand_pair<0>(b, ready, 0);
      finish(b, ready);
      if (left >= K_BLOCKS_HELD) load_pair<0>(0);
    }
#else
    if (source.count > 0) expand_pair<0>(b, ready, 0);
    finish(b, ready);
    if (source.count > 0 && left > 0) load_pair<0>(0);
#endif
  }
};

#endif

#endif

#endif
