// Weights of the kernels that dequantize them in registers, for inclusion: the A operands of MMAs from what
// dequant_layout.py lays out.
//
// Macros: W_FMT (FormatCode), SCALED_TOKENS (tokens are 2^100 times their value).

#ifndef MOE_RUNTIME_DEQUANT_UNIT
#define MOE_RUNTIME_DEQUANT_UNIT

#include "numbers.cuh"

constexpr bool E2M1 = W_FMT != MXFP8;
constexpr int QUANT_BYTES = E2M1 ? 2048 : 4096;  // 64 rows x 64 columns
constexpr int SCALE_BYTES = W_FMT == NVFP4 ? 256 : 128;
constexpr int UNIT_BYTES = QUANT_BYTES + SCALE_BYTES;
constexpr u32 LANES = 0x81C081C0;  // sign and magnitude of an e2m1 value in both bf16 halves

static_assert(W_FMT == MXFP8 || W_FMT == NVFP4 || W_FMT == MXFP4, "W_FMT: no format that is dequantized in registers");

__device__ __forceinline__ uint4 load_16(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}

// Combines the bits of two words as SLOTS of dequant_layout.py needs them. Written with operators, ptxas would split
// the mask again for each use.
__device__ __forceinline__ u32 selected(u32 even, u32 odd) {
  u32 both;
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;"
      : "=r"(both)
      : "r"(even), "r"(odd), "n"(0xC180C180));  // `even` where the mask has ones
  return both;
}

// Multiplies a pair of e4m3 values, given as bf16 bits of 2^-120 times their value, by 2^120. Keeps NaN.
__device__ __forceinline__ u32 any_e4m3(u32 pair) {
  const u32 nan = ((pair & 0x07F007F0) + 0x00100010) & 0x08000800;  // a bit for each value with all bits set
  return multiply(pair, 0x7B807B80) | ((nan << 4) - (nan >> 4));
}

// The A operands of wgmma from the quants of 64 columns: 16 values of row r and of row r + 8 for each thread. Without
// SPECIAL_VALUES, MXFP8 weights and scales hold no NaN, and scales are at most 2^7 (MXFP4: 2^1).
template <bool SPECIAL_VALUES>
struct Unit {
  uint4 quants[QUANT_BYTES / 2048];
  u16 scales[2];  // bf16, of row r and r + 8

  __device__ __forceinline__ void load(u32 quants_at, u32 scales_at) { prepare(fetch(quants_at, scales_at)); }

  // Starts to load, and gives both scales as they are stored.
  __device__ __forceinline__ u16 fetch(u32 quants_at, u32 scales_at) {
    for (int i = 0; i < QUANT_BYTES / 2048; ++i) quants[i] = load_16(quants_at + i * 2048);
    u16 bytes;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bytes) : "r"(scales_at));
    return bytes;
  }

  __device__ __forceinline__ void prepare(u16 bytes) {
    if (W_FMT == NVFP4) {
      // SCALE_CODES of dequant_layout.py, shifted left by 4: bf16 bits of 2^-106 times the scale.
      const u32 codes = __byte_perm(bytes, 0, 0x4140) * 16;
      // 2^10 times the scale. 2^-11 stands for 0: its products are less than half of the smallest bf16 value.
      u32 pair = codes + 0x3A003A00;
      if (!SCALED_TOKENS)
        pair = multiply(multiply(codes, 0x77807780), 0x77807780);  // 2^118 times the scale, by 2^112 twice
      asm("mov.b32 {%0, %1}, %2;" : "=h"(scales[0]), "=h"(scales[1]) : "r"(pair));
    } else if (SPECIAL_VALUES) {
      scales[0] = static_cast<u16>(e8m0_pair(bytes & 255));
      scales[1] = static_cast<u16>(e8m0_pair(bytes >> 8));
    } else {
      // 2^120 times the scale (MXFP4: 2^126).
      const u32 pair = __byte_perm(bytes, 0, 0x4140) * 128 + (W_FMT == MXFP4 ? 0x3F003F00 : 0x3C003C00);
      asm("mov.b32 {%0, %1}, %2;" : "=h"(scales[0]), "=h"(scales[1]) : "r"(pair));
    }
  }

  // The pair of e2m1 values in LANES of `word`, which are bf16 bits of 2^-126 times their value, times a scale.
  static __device__ __forceinline__ u32 e2m1(u32 word, u32 scale) {
    const u32 pair = word & LANES;
    return multiply(SPECIAL_VALUES ? multiply(pair, 0x7E807E80) : pair, scale);
  }

  // Columns 4 * step .. 4 * step + 3 of the 16 of each thread.
  __device__ __forceinline__ void dequantize(int step, u32 (&a)[4]) const {
    // Only with these moves does the compiler use halves of a register as operands of multiplications.
    u32 scale[2];
    for (int half = 0; half < 2; ++half) asm("mov.b32 %0, {%1, %1};" : "=r"(scale[half]) : "h"(scales[half]));
    if (E2M1) {
      // SLOTS of dequant_layout.py gives the positions of the bits of the four values of each half: in the words of an
      // even and an odd step, and in `both`, which has bits of either.
      const u32 even = step < 2 ? quants[0].x : quants[0].z, odd = step < 2 ? quants[0].y : quants[0].w;
      const u32 both = selected(even, odd);
      if (step % 2 == 0) {
        a[0] = e2m1(even << 2, scale[0]);
        a[1] = e2m1(even << 6, scale[1]);
        a[2] = e2m1(__funnelshift_r(even, even, 4), scale[0]);
        a[3] = e2m1(both, scale[1]);
      } else {
        a[0] = e2m1(odd << 4, scale[0]);
        a[1] = e2m1(__funnelshift_r(odd, odd, 24), scale[1]);
        a[2] = e2m1(__funnelshift_r(odd, odd, 2), scale[0]);
        a[3] = e2m1(__funnelshift_r(both, both, 6), scale[1]);
      }
    } else {
      const uint4 q = quants[QUANT_BYTES == 4096 ? step >> 1 : 0];
      const u32 rows[2] = {step & 1 ? q.z : q.x, step & 1 ? q.w : q.y};
      for (int half = 0; half < 2; ++half) {
        // BYTE_SLOTS of dequant_layout.py.
        const u32 word = rows[half];
        u32 pairs[2] = {word & 0x87F087F0, ((word << 4) & 0x80F080F0) | ((word >> 4) & 0x07000700)};
        for (int i = 0; i < 2; ++i)
          a[2 * i + half] = multiply(SPECIAL_VALUES ? any_e4m3(pairs[i]) : pairs[i], scale[half]);
      }
    }
  }
};

#endif
