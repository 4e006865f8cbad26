// Four-bit weights that become e4m3 in shared memory, for inclusion by tma_gemm.cu. The threads that produce load them packed
// into registers and expand a block of K while the next one is on its way.
//
// Macro EXPAND: weights along K that share a block scale, 16 of `nvfp4` or 32 of `mxfp4`; 0 if weights are stored as they are
// multiplied. `expanded_weights.py` makes the units that are read here: 64 weight rows times 128 columns of K, then their scale
// codes. A unit has 256 words of 16 bytes, of 32 weights each; word `32 * group + 8 * span + row` is of row `8 * group + row`
// and of columns `32 * span` and on. So a warp loads 512 contiguous bytes, and 8 lanes store to all banks.
//
// A scale code is the upper byte but the sign of an fp16 number (5 bits of exponent, 3 of mantissa), by which the e2m1
// magnitudes are multiplied; the products are rounded to e4m3. A table has the 8 products of each code as 8 bytes.

#ifndef MOE_RUNTIME_TMA_EXPAND
#define MOE_RUNTIME_TMA_EXPAND

#include "tma_sizes.cuh"

#if EXPAND

constexpr int UNIT_ROWS = 64, UNIT_WORDS = 2;  // words of a thread
constexpr int UNITS = FEW ? 2 : 4;             // of a stage
constexpr int UNIT_QUANTS = UNIT_ROWS * 64, THREAD_SCALES = 64 / EXPAND;
constexpr int UNIT_BYTES = UNIT_QUANTS + 128 * THREAD_SCALES;
constexpr int PREFETCHED = 4;  // blocks of K that L2 is asked for in advance
static_assert(FP8 && (EXPAND == 16 || EXPAND == 32), "only e4m3 rows are multiplied with expanded weights");

__device__ __forceinline__ u32 e4m3_codes(float low, float high) {
    u16 codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}

// The products of a scale code with 0, 0.5, 1, 1.5, 2, 3, 4, 6 as e4m3.
__device__ __forceinline__ uint2 products_of(u32 code) {
    float scale = __uint_as_float(code < 8 ? 0 : code >= 248 ? 0x7FC00000 : (code + 112 * 8) << 20);
    return make_uint2(e4m3_codes(0.0f * scale, 0.5f * scale) | e4m3_codes(scale, 1.5f * scale) << 16,
                      e4m3_codes(2.0f * scale, 3.0f * scale) | e4m3_codes(4.0f * scale, 6.0f * scale) << 16);
}

// Called by the whole block, which must synchronize before the table is used.
__device__ __forceinline__ void fill_table(uint2* table) {
    for (int code = threadIdx.x; code < TABLE_BYTES / 8; code += 128 * (MATH_WGS + 1)) table[code] = products_of(code);
}

// Bytes of `low` and `high` by the four lower nibbles of `selector`. The compiler looks into an intrinsic, and would split the
// mask that two of these share.
__device__ __forceinline__ u32 selected_bytes(u32 low, u32 high, u32 selector) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
    return bytes;
}

// 8 weights: bits 4i .. 4i + 2 of the word are the magnitude of weight i; its sign is at bit 8i + 7 of the first 4, and at bit
// 8i - 29 of the last.
__device__ __forceinline__ void expand_8(u32 word, uint2 table, u32& first, u32& last) {
    u32 magnitudes = word & 0x77777777;
    first = selected_bytes(table.x, table.y, magnitudes) | (word & 0x80808080);
    last = selected_bytes(table.x, table.y, magnitudes >> 16) | (word << 4 & 0x80808080);
}

__device__ __forceinline__ void store_16(u32 to, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// 32 weights with the entries of the first and of the last 16; `to` and `next` are the places of both in the 128-byte swizzle.
__device__ __forceinline__ void expand_word(uint4 word, uint2 table, uint2 next_table, u32 to, u32 next) {
    u32 x, y, z, w;
    expand_8(word.x, table, x, y), expand_8(word.y, table, z, w);
    store_16(to, x, y, z, w);
    expand_8(word.z, next_table, x, y), expand_8(word.w, next_table, z, w);
    store_16(next, x, y, z, w);
}

// What a thread has of a block of K, and where its next is.
struct Expander {
    const u8* from[UNITS];
    uint4 words[UNITS][UNIT_WORDS];
    u32 scales[UNITS];
    u32 table;     // shared-memory address
    u32 to, next;  // of the first word of the thread, from the weights of a stage
    int count;     // units of the tile

    __device__ __forceinline__ explicit Expander(const uint2* entries) : table(shared_address(entries)) {
        int warp = threadIdx.x / 32 % 4, row = threadIdx.x % 8, span = threadIdx.x % 32 / 8;
        to = (8 * warp + row) * 128 + ((2 * span ^ row) << 4), next = to ^ 16;
    }

    __device__ __forceinline__ void load(int u) {
        int thread = threadIdx.x % 128;
#pragma unroll
        for (int j = 0; j < UNIT_WORDS; ++j) {
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(words[u][j].x), "=r"(words[u][j].y), "=r"(words[u][j].z), "=r"(words[u][j].w)
                         : "l"(from[u] + thread * 16 + j * 2048));
        }
        const u8* of_thread = from[u] + UNIT_QUANTS + thread * THREAD_SCALES;
        scales[u] = EXPAND == 16 ? *(const u32*)of_thread : *(const u16*)of_thread;
        from[u] += UNIT_BYTES;
    }

    // Asks L2 for `blocks` blocks of K, `ahead` behind the next to be loaded.
    __device__ __forceinline__ void prefetch(int ahead, int blocks) const {
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            if (u >= count) continue;
            asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from[u] + ahead * UNIT_BYTES),
                         "r"(blocks * UNIT_BYTES)
                         : "memory");
        }
    }

    // Finds the units of a tile of so many halves and loads the first block of K. Past the last column any unit will do.
    __device__ __forceinline__ void begin(const u8* units, const Tile& tile, int columns, int k_blocks, int halves) {
        int blocks = 2 * ceil_div(columns, 2 * UNIT_ROWS);
        count = FEW ? UNITS : 2 * halves;
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            int part = GATED ? u * 2 / UNITS : 0, of_part = GATED ? u % (UNITS / 2) : u;
            int block = min(tile.column / UNIT_ROWS + of_part, blocks - 1);
            long long unit = ((long long)tile.expert * (GATED ? 2 : 1) + part) * blocks + block;
            from[u] = units + unit * k_blocks * UNIT_BYTES;
        }
        if (threadIdx.x % 128 == 0 && k_blocks > 1) prefetch(1, min(PREFETCHED, k_blocks - 1));
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
            if (u < count) load(u);
    }

    __device__ __forceinline__ uint2 entry(int u, int i) const {
        u32 code = selected_bytes(scales[u], 0, 0x4440 + i);
        uint2 products;
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(products.x), "=r"(products.y) : "r"(table + code * 8));
        return products;
    }

    // Writes the weights of a stage to `b`, arrives at `ready`, and loads the next block of K if one is `left`.
    __device__ __forceinline__ void expand(u32 b, u32 ready, int left) {
        if (threadIdx.x % 128 == 0 && left > PREFETCHED) prefetch(PREFETCHED, 1);
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            if (u >= count) continue;
#pragma unroll
            for (int j = 0; j < UNIT_WORDS; ++j) {
                constexpr int SCALES = 32 / EXPAND;
                u32 at = b + u * UNIT_ROWS * 128 + j * 4096;
                uint2 first = entry(u, SCALES * j);
                expand_word(words[u][j], first, SCALES > 1 ? entry(u, SCALES * j + 1) : first, at + to, at + next);
            }
            if (left > 0) load(u);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        barrier_arrive_warp(ready);
    }
};

#endif

#endif
