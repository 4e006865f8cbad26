// A partial result as it travels: numbers of the wire format, then their scales. Macros: WIRE (FormatCode),
// PARTIAL_SCALES_AT.

#pragma once

#include "quantize.cuh"

#define WIRE_BF16 (WIRE == 0)

// 8 numbers of a partial result in the wire format, and their scale.
struct Partial {
#if WIRE_BF16
  uint4 raw;
#else
  uint2 raw;
  u32 scale;
#endif
  __device__ __forceinline__ void load(const u8* partial, int unit) {
    raw = reinterpret_cast<const decltype(raw)*>(partial)[unit];
#if !WIRE_BF16
    const u8* scales = partial + PARTIAL_SCALES_AT;
    scale = WIRE == FP8_BLOCK ? reinterpret_cast<const u32*>(scales)[unit / 16] : scales[unit / 4];
#endif
  }

  __device__ __forceinline__ void add_to(float (&total)[8]) const {
#if WIRE_BF16
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int n = 0; n < 8; ++n) total[n] = __fadd_rn(total[n], bf16_value(words[n / 2] >> 16 * (n % 2) & 0xFFFF));
#else
    const u32 bits = WIRE == FP8_BLOCK ? scale : scale == 0 ? 0x400000u : scale == 255 ? NOT_A_NUMBER : scale << 23;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const u32 code = (n < 4 ? raw.x : raw.y) >> 8 * (n % 4) & 0xFF;
      total[n] = __fadd_rn(total[n], __fmul_rn(e4m3_value(code), __uint_as_float(bits)));
    }
#endif
  }
};
