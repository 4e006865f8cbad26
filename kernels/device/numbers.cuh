// Number formats and scale layout of the kernels that decode, for inclusion; `kernels/formats/bits.py` has them for Triton.

#ifndef MOE_RUNTIME_NUMBERS
#define MOE_RUNTIME_NUMBERS

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int BF16 = 0, MXFP8 = 2, NVFP4 = 3;  // FormatCode

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Products of two bf16 pairs.
__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// Two e4m3 numbers as fp32.
__device__ __forceinline__ void e4m3_pair(u16 bytes, float& low, float& high) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(bytes));
  asm("{\n.reg .f16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
      : "=f"(low), "=f"(high)
      : "r"(halves));
}

// x / s rounded to nearest, `inverse` being 1 / s rounded; exact while neither the quotient nor the remainder is denormal,
// below which a code of e4m3 is 0 anyway.
__device__ __forceinline__ float divide(float x, float s, float inverse) {
  float q = __fmul_rn(x, inverse);
  q = __fmaf_rn(__fmaf_rn(q, s, -x), -inverse, q);  // this way round -0 stays -0
  return __fmaf_rn(__fmaf_rn(q, s, -x), -inverse, q);
}

// bf16 2^(byte - 127), twice; 0 gives 2^-127, 255 NaN.
__device__ __forceinline__ u32 e8m0_pair(u32 byte) {
  u32 half = byte == 0 ? 0x40u : (byte == 255 ? 0x7FC0u : byte << 7);
  return half | (half << 16);
}

// Byte of the scale of row `row` in the 128x4 swizzle (swizzle.py).
__device__ __forceinline__ long long swizzled_offset(long long row, int column, int columns) {
  return row / 128 * ((columns + 3) / 4 * 512) + column / 4 * 512 + row % 32 * 16 + row % 128 / 32 * 4 + column % 4;
}

// What e2m1 numbers that lie as bf16 bits are multiplied by, of a scale: they are 2^-126 times their value, and 2^118 is the
// most that a scale can carry.
__device__ __forceinline__ u32 e4m3_factor(float scale) { return pack_bf16(scale * 0x1p118f, scale * 0x1p118f); }

// The two e2m1 numbers of a byte (nothing above it) with a factor of `e4m3_factor`, 2^100 times their value.
__device__ __forceinline__ u32 e2m1_pair(u32 byte, u32 factor) {
  const u32 placed = (byte * (1u << 6 | 1u << 18) & 0x01C001C0) | (byte * (1u << 12 | 1u << 24) & 0x80008000);
  return multiply(multiply(placed, factor), 0x75807580);  // 2^108
}

// Two e4m3 numbers, times a pair of bf16.
__device__ __forceinline__ u32 e4m3_decoded(u16 bytes, u32 scale) {
  float low, high;
  e4m3_pair(bytes, low, high);
  return multiply(pack_bf16(low, high), scale);
}

#endif
