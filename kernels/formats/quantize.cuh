// Quantizes a unit of consecutive values held by one thread, for inclusion. Gives the same bits as
// `kernels/formats/quantize.py`. Consecutive units are in consecutive lanes, and all lanes of a warp must take part.

#include "numbers.cuh"

constexpr u32 MAGNITUDE = 0x7FFFFFFFu, INFINITE = 0x7F800000u, NOT_A_NUMBER = 0x7FC00000u;

// Values of a unit.
__host__ __device__ constexpr int unit_numbers(int format) { return format == BF16 ? 8 : 16; }

// bf16 bits; a NaN keeps its sign and upper payload and is made quiet.
__device__ __forceinline__ u32 bf16_bits(float x) {
  const u32 bits = __float_as_uint(x);
  const bool nan = (bits & MAGNITUDE) > INFINITE;
  return (nan ? bits | 0x400000u : bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}

// Whether a or b is a NaN, in one instruction.
__device__ __forceinline__ bool unordered(float a, float b) { return !(a < b || a >= b); }

// `bf16_bits` of 8 values in order; uses the hardware conversion unless there is a NaN.
__device__ __forceinline__ uint4 bf16_words(const float (&x)[8]) {
  const bool nan = unordered(x[0], x[1]) || unordered(x[2], x[3]) || unordered(x[4], x[5]) || unordered(x[6], x[7]);
  uint4 words = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
  if (nan) {
    words.x = bf16_bits(x[0]) | bf16_bits(x[1]) << 16, words.y = bf16_bits(x[2]) | bf16_bits(x[3]) << 16;
    words.z = bf16_bits(x[4]) | bf16_bits(x[5]) << 16, words.w = bf16_bits(x[6]) | bf16_bits(x[7]) << 16;
  }
  return words;
}

__device__ __forceinline__ float bf16_value(u32 bits) { return __uint_as_float(bits << 16); }

// e4m3 bits of two values, saturating; NaN gives 0x7F.
__device__ __forceinline__ u32 e4m3_codes(float low, float high) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ float e4m3_value(u32 code) {
  float low, high;
  e4m3_pair(static_cast<u16>(code), low, high);
  return low;
}

// Largest magnitude of 16 bf16 values, two in a word, as bf16 bits: NaN above Inf above every finite value.
__device__ __forceinline__ u32 bf16_amax(const u32* pairs) {
  u32 amax = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) amax = __vmaxu2(amax, pairs[i] & 0x7FFF7FFFu);
  return max(amax & 0xFFFF, amax >> 16);
}

// 0x4B000000 plus the e2m1 code of a magnitude, saturating; NaN gives 0. The code grows by 4 from 0 to 2, by 2 from 2
// to 4 and by 1 from 4 to 6. The sum has a term for each part, exact and clamped to 0..1. fp32 values from 2^23 on have
// steps of 1, so sums there round to whole codes, ties to even. Where a term is not 0, the terms before it sum to an
// even code.
__device__ __forceinline__ u32 e2m1_sum(float magnitude) {
  const float to_2 = __saturatef(__fmul_rn(magnitude, 0.5f));
  const float to_4 = __saturatef(__fmaf_rn(magnitude, 0.5f, -1.0f));
  const float to_6 = __saturatef(__fmaf_rn(magnitude, 0.5f, -2.0f));
  return __float_as_uint(__fadd_rn(__fmaf_rn(to_4, 2.0f, __fmaf_rn(to_2, 4.0f, 0x1p23f)), to_6));
}

// Encode scale of an NVFP4 row from the bits of its largest magnitude (`token_gsf`).
__device__ __forceinline__ float token_gsf(u32 amax_bits) {
  if (amax_bits == 0 || amax_bits >= INFINITE) return 1.0f;
  return fminf(__fdiv_rn(2688.0f, fmaxf(__uint_as_float(amax_bits), 0x1p-89f)), 0x1p100f);
}

// The largest `bits` of `LANES` neighbouring lanes.
template <int LANES>
__device__ __forceinline__ u32 largest(u32 bits) {
#pragma unroll
  for (int other = LANES / 2; other > 0; other /= 2) bits = max(bits, __shfl_xor_sync(0xFFFFFFFFu, bits, other));
  return bits;
}

// e2m1 codes of 8 bf16 values, two in a word, times a factor >= 0; `signs` is 0x88888888, or 0 for codes without signs.
__device__ __forceinline__ u32 e2m1_word(const u32* pairs, float factor, u32 signs) {
  u32 codes = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    const u32 bits = i % 2 == 0 ? pairs[i / 2] << 16 : pairs[i / 2] & 0xFFFF0000u;
    codes = codes * 16 + e2m1_sum(__fmul_rn(fabsf(__uint_as_float(bits)), factor));
  }
  codes -= 0x4B000000u * 0x11111111u;
  // Upper bytes of the even values and of the odd ones; byte i belongs to pair i.
  const u32 ab = __byte_perm(pairs[0], pairs[1], 0x7351), cd = __byte_perm(pairs[2], pairs[3], 0x7351);
  const u32 even = __byte_perm(ab, cd, 0x5410), odd = __byte_perm(ab, cd, 0x7632);
  return codes | (((even >> 4 & 0x0F0F0F0Fu) | (odd & 0xF0F0F0F0u)) & signs);
}

// Quantizes the 16 bf16 values of unit `unit` of an NVFP4 row; `amax` is their maximum, `gsf` is finite. Stores nothing
// unless `inside`.
__device__ __forceinline__ void quantize_nvfp4(const u32* pairs, u32 amax, float gsf, u8* quants, u8* scales, int unit,
                                               bool inside) {
  const bool poisoned = amax << 16 >= INFINITE;
  const float largest = poisoned ? 0.0f : bf16_value(amax);
  const u32 code = e4m3_codes(__fdiv_rn(__fmul_rn(gsf, largest), 6.0f), 0.0f) & 0xFF;
  const bool dead = (code & 0x7F) == 0;
  // All codes of a dead block are 0, even those of NaN and Inf, whose product with 0 is NaN.
  const float factor = dead ? 0.0f : __fdiv_rn(gsf, e4m3_value(code));
  const u32 signs = dead ? 0 : 0x88888888u;
  const u32 low = e2m1_word(pairs, factor, signs), high = e2m1_word(pairs + 4, factor, signs);
  if (inside) {
    reinterpret_cast<uint2*>(quants)[unit] = make_uint2(low, high);
    scales[unit] = poisoned ? 0x7F : code;
  }
}

// Quantizes unit `unit` of a row of any other format into its quants and scales. Stores nothing unless `inside`.
template <int FORMAT>
__device__ __forceinline__ void quantize_unit(const float (&x)[unit_numbers(FORMAT)], float gsf, u8* quants, u8* scales,
                                              int unit, bool inside) {
  static_assert(FORMAT != NVFP4);
  constexpr int NUMBERS = unit_numbers(FORMAT);
  if constexpr (FORMAT == BF16) {
    if (inside) reinterpret_cast<uint4*>(quants)[unit] = bf16_words(x);
    return;
  }
  u32 amax = 0;
#pragma unroll
  for (int i = 0; i < NUMBERS; ++i) amax = max(amax, __float_as_uint(x[i]) & MAGNITUDE);
  if constexpr (FORMAT == FP8_BLOCK) amax = largest<8>(amax);
  if constexpr (FORMAT == MXFP8) amax = largest<2>(amax);
  const bool poisoned = amax >= INFINITE;
  if (poisoned) amax = 0;
  const float ideal = __fdiv_rn(__uint_as_float(max(amax, 0x38D1B717u)), 448.0f);  // at least 1e-4
  const u32 byte = (__float_as_uint(ideal) + 0x7FFFFF) >> 23;
  const float inverse = FORMAT == MXFP8 ? __uint_as_float((254 - byte) << 23) : __frcp_rn(ideal);
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 16; i += 4) {
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float clean = poisoned ? 0.0f : x[i + j];
      v[j] = FORMAT == MXFP8 ? __fmul_rn(clean, inverse) : divide(clean, ideal, inverse);
    }
    words[i / 4] = e4m3_codes(v[0], v[1]) | e4m3_codes(v[2], v[3]) << 16;
  }
  if (inside) {
    reinterpret_cast<uint4*>(quants)[unit] = make_uint4(words[0], words[1], words[2], words[3]);
    if (FORMAT == MXFP8 && unit % 2 == 0) scales[unit / 2] = poisoned ? 255 : byte;
    if (FORMAT == FP8_BLOCK && unit % 8 == 0)
      reinterpret_cast<float*>(scales)[unit / 8] = poisoned ? __uint_as_float(NOT_A_NUMBER) : ideal;
  }
}
