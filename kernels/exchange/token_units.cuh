// The numbers of a token in the registers of the threads that quantize it, for inclusion.

#ifndef MOE_RUNTIME_TOKEN_UNITS
#define MOE_RUNTIME_TOKEN_UNITS

#include "quantize.cuh"

// Units of a token of SIZE numbers: a thread of a team of TEAM_SIZE has the one of its number, and every TEAM_SIZE-th
// after it.
template <int FORMAT, int SIZE, int TEAM_SIZE>
struct TokenUnits {
  static constexpr int UNIT = unit_numbers(FORMAT), UNITS = SIZE / UNIT,
                       PER_THREAD = (UNITS + TEAM_SIZE - 1) / TEAM_SIZE;
  static constexpr int LOADS = UNIT / 8;  // of 16 bytes

  u32 raw[PER_THREAD][LOADS * 4];  // two numbers each
  u32 amax[PER_THREAD];            // bf16 bits, for NVFP4

  __device__ __forceinline__ void load(const u16* token, int thread) {
    const uint4* row = reinterpret_cast<const uint4*>(token);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const int unit = i * TEAM_SIZE + thread;
#pragma unroll
      for (int j = 0; j < LOADS; ++j) {
        const uint4 four = unit < UNITS ? row[unit * LOADS + j] : make_uint4(0, 0, 0, 0);
        raw[i][j * 4] = four.x, raw[i][j * 4 + 1] = four.y, raw[i][j * 4 + 2] = four.z, raw[i][j * 4 + 3] = four.w;
      }
    }
  }

  // Finds the `amax` of this thread's units, and returns the largest.
  __device__ __forceinline__ u32 find_amax() {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      amax[i] = bf16_amax(raw[i]);
      most = max(most, amax[i]);
    }
    return most;
  }

  // The encode scale of the token, from the largest `amax` of each warp of the team.
  static __device__ __forceinline__ float gsf(const u32* maxima) {
    u32 most = 0;
#pragma unroll
    for (int w = 0; w < TEAM_SIZE / 32; ++w) most = max(most, maxima[w]);
    return token_gsf(most << 16);
  }

  // Writes quants and block scales of this thread's units. NVFP4 needs `amax` and the encode scale.
  __device__ __forceinline__ void quantize(float gsf, u8* quants, u8* scales, int thread) const {
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const int unit = i * TEAM_SIZE + thread;
      if constexpr (FORMAT == NVFP4) {
        quantize_nvfp4(raw[i], amax[i], gsf, quants, scales, unit, unit < UNITS);
      } else if constexpr (FORMAT == BF16) {
        if (unit < UNITS)
          reinterpret_cast<uint4*>(quants)[unit] = make_uint4(raw[i][0], raw[i][1], raw[i][2], raw[i][3]);
      } else {
        float values[UNIT];
#pragma unroll
        for (int n = 0; n < UNIT; ++n) values[n] = bf16_value(raw[i][n / 2] >> 16 * (n % 2) & 0xFFFF);
        quantize_unit<FORMAT>(values, gsf, quants, scales, unit, unit < UNITS);
      }
    }
  }
};

#endif
