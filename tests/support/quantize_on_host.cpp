// The NVFP4 quantizer of kernels/formats/quantize.cuh and what others share with it on a CPU: test_quantize_on_host.py puts the kernel's own text where the line
// below says so. What follows here stands for instructions of the GPU.

#include <algorithm>
#include <cmath>
#include <cstring>

using std::max;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

struct uint2 {
  u32 x, y;
};
struct uint4 {
  u32 x, y, z, w;
};
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline u32 __float_as_uint(float x) {
  u32 bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(u32 bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
// NaN gives +0.
inline float __saturatef(float x) { return x > 0 ? std::min(x, 1.0f) : 0.0f; }
inline u32 __vmaxu2(u32 a, u32 b) { return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16; }
inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(b) << 32 | a;
  u32 picked = 0;
  for (int i = 0; i < 4; ++i) picked |= static_cast<u32>(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return picked;
}

// To nearest even; every NaN is the one.
inline u32 pack_bf16(float low, float high) {
  auto rounded = [](float x) {
    const u32 bits = __float_as_uint(x);
    return std::isnan(x) ? 0x7FFFu : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  };
  return rounded(low) | rounded(high) << 16;
}

inline float e4m3_value(u32 code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7F) == 0x7F) return NAN;
  const float x = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return code & 0x80 ? -x : x;
}

// Saturating; the nearest, of two as near the one with the even code. The second number is 0 wherever this is called.
inline u32 e4m3_codes(float x, float) {
  if (std::isnan(x)) return 0x7F;
  const double a = std::min<double>(std::fabs(x), 448);
  u32 best = 0;
  for (u32 code = 1; code < 0x7F; ++code) {
    const double off = std::fabs(e4m3_value(code) - a), least = std::fabs(e4m3_value(best) - a);
    if (off < least || (off == least && code % 2 == 0)) best = code;
  }
  return best | (std::signbit(x) ? 0x80 : 0);
}

inline u32 e4m3_code(float x) { return e4m3_codes(x, 0.0f); }

// THE TEXT OF quantize.cuh

extern "C" {

// Codes of the magnitudes with bits from `first` on, every `step`-th.
void codes_of(u32 first, u32 step, int count, u8* codes) {
  for (int i = 0; i < count; ++i) codes[i] = static_cast<u8>(e2m1_sum(__uint_as_float(first + i * step)) - 0x4B000000u);
}

void quotients(const float* x, const float* s, int count, float* out) {
  for (int i = 0; i < count; ++i) out[i] = divide(x[i], s[i], 1.0f / s[i]);
}

// Of blocks of NVFP4 by their largest magnitudes.
void scale_codes(float gsf, const float* amax, int count, u8* codes) {
  for (int i = 0; i < count; ++i) codes[i] = static_cast<u8>(Requantization{gsf}.scale_code(amax[i]));
}

// Of 8 numbers each.
void words_of(const float* x, int count, uint4* words) {
  for (int i = 0; i < count; ++i) words[i] = bf16_words(*reinterpret_cast<const float(*)[8]>(x + 8 * i));
}

// As `dispatch_send` does it with a row of `units` times 16 numbers; `gsf` is the encode scale, or null for the row's own.
void quantize_row(const u32* pairs, int units, const float* gsf, u8* quants, u8* scales, float* row_scale) {
  u32 amax = 0;
  for (int unit = 0; unit < units; ++unit) amax = max(amax, bf16_amax(pairs + unit * 8));
  const float encode = gsf != nullptr ? *gsf : token_gsf(amax << 16);
  for (int unit = 0; unit < units; ++unit, pairs += 8)
    quantize_nvfp4(pairs, bf16_amax(pairs), encode, quants, scales, unit, true);
  *row_scale = __fdiv_rn(1.0f, encode);
}
}
