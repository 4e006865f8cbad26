// Number formats and the scale layout for kernels that dequantize, for inclusion; `kernels/formats/bits.py` is for
// Triton.

#ifndef MOE_RUNTIME_NUMBERS
#define MOE_RUNTIME_NUMBERS

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int BF16 = 0, FP8_BLOCK = 1, MXFP8 = 2, NVFP4 = 3, MXFP4 = 4;  // FormatCode

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The vector of BYTES, 16 or 8, that one instruction loads or stores.
template <int BYTES>
struct Wide {
  using type = uint4;
};
template <>
struct Wide<8> {
  using type = uint2;
};

// Word `i` of four, for an `i` that the compiler knows.
__device__ __forceinline__ u32 word_of(const uint4& four, int i) {
  return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

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

// Two e4m3 values as fp32.
__device__ __forceinline__ void e4m3_pair(u16 bytes, float& low, float& high) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(bytes));
  asm("{\n.reg .f16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
      : "=f"(low), "=f"(high)
      : "r"(halves));
}

// x / s rounded to nearest, given `inverse`, 1 / s rounded. Exact unless the quotient or the remainder is denormal; the
// e4m3 code is 0 then anyway.
__device__ __forceinline__ float divide(float x, float s, float inverse) {
  float q = __fmul_rn(x, inverse);
  q = __fmaf_rn(__fmaf_rn(q, s, -x), -inverse, q);  // this sign order keeps -0
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

// Factor for e2m1 codes placed as bf16 bits, from their scale: scale * 2^118. Placed codes are 2^-126 times their
// value, and 2^118 is the largest power of two that a scale in bf16 can carry.
__device__ __forceinline__ u32 e4m3_factor(float scale) { return pack_bf16(scale * 0x1p118f, scale * 0x1p118f); }

// The two e2m1 values of a byte (upper bits 0) times a factor of `e4m3_factor`: bf16 pairs of 2^100 times their value.
__device__ __forceinline__ u32 e2m1_pair(u32 byte, u32 factor) {
  const u32 placed = (byte * (1u << 6 | 1u << 18) & 0x01C001C0) | (byte * (1u << 12 | 1u << 24) & 0x80008000);
  return multiply(multiply(placed, factor), 0x75807580);  // 2^108
}

// Two e4m3 values times a pair of bf16.
__device__ __forceinline__ u32 e4m3_decoded(u16 bytes, u32 scale) {
  float low, high;
  e4m3_pair(bytes, low, high);
  return multiply(pack_bf16(low, high), scale);
}

#endif
