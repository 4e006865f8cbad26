// Expert weights put in the order in which dequant_gemm.cu reads them: the units of dequant_layout.py, whose
// `pack_units` has the same bits.
//
// A block makes a unit. A thread makes what one of a warpgroup holds of it: 16 columns of two weight rows. The first
// threads of a row store its scales, too. Places without a weight, at the end of N and K, are zeros.
//
// Macros: W_FMT (FormatCode), SLOTS and BYTE_SLOTS (positions of bits in words, see dequant_layout.py), SCALE_CODES,
// LARGEST_FAST_SCALE (`mxfp8`, `mxfp4`).

#include "numbers.cuh"

static_assert(W_FMT == MXFP8 || W_FMT == NVFP4 || W_FMT == MXFP4, "W_FMT: no format that is dequantized in registers");

constexpr int BITS = W_FMT == MXFP8 ? 8 : 4;
constexpr int COLUMNS = 16;                      // of a thread
constexpr int SCALES = W_FMT == NVFP4 ? 4 : 2;   // of a row of a unit
constexpr int QUANT_BYTES = 64 * 64 * BITS / 8;  // of a unit
constexpr int UNIT_BYTES = QUANT_BYTES + 64 * SCALES;
constexpr int WORDS = COLUMNS * BITS / 32;  // that a thread reads of a row

// Positions of the bits `s e e m` of a value by odd step, register and place in it, in two words.
static __device__ constexpr u8 SLOT[2][4][2][4] = SLOTS;
// Positions of the bits `s eeee mmm` in a half of a word, by pair.
static __device__ constexpr u8 BYTE_SLOT[2][8] = BYTE_SLOTS;
static __device__ constexpr u8 CODES[127] = SCALE_CODES;

// The words of a step and the next, or of steps 2 and 3: values are in the order of columns.
__device__ __forceinline__ uint2 place(u32 even_0, u32 odd_0, u32 even_1, u32 odd_1) {
  // By step and weight row, four values each.
  const u32 values[2][2] = {{even_0, even_1}, {odd_0, odd_1}};
  u64 words = 0;
#pragma unroll
  for (int odd = 0; odd < 2; ++odd)
#pragma unroll
    for (int of = 0; of < 4; ++of)
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int bit = 0; bit < 4; ++bit) {
          const u32 from = values[odd][of % 2] >> (8 * (of / 2) + 4 * i + 3 - bit);
          words |= static_cast<u64>(from & 1) << SLOT[odd][of][i][bit];
        }
  return make_uint2(static_cast<u32>(words), static_cast<u32>(words >> 32));
}

// A word of two e4m3 values of the pairs of a step: value `i` of each.
__device__ __forceinline__ u32 place_bytes(u32 step, int i) {
  u32 half = 0;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair)
#pragma unroll
    for (int bit = 0; bit < 8; ++bit) half |= (step >> (16 * pair + 8 * i + 7 - bit) & 1) << BYTE_SLOT[pair][bit];
  return half;
}

// Weights `[E, num_rows, num_columns]` with swizzled scales, of `unit_rows` by `unit_columns` units an expert. Half 0
// of a unit's rows is from `first_0` on, each `row_step`th, half 1 from `first_1` on; with `gated` 0 rows follow each
// other. `bad` is set where `nvfp4` scales are negative or NaN, `marks` where rows hold special values.
extern "C" __global__ void __launch_bounds__(128)
    pack_units(const u8* quants, const u8* scales, u8* units, u8* marks, int* bad, int num_rows, int num_columns,
               int unit_rows, int unit_columns, int chunk, int gated, int first_0, int first_1, int row_step) {
  const int place_in_unit = threadIdx.x, t = threadIdx.x % 4, row = threadIdx.x / 4 % 8, warp = threadIdx.x / 32;
  const int column_unit = blockIdx.x % unit_columns, unit_row = blockIdx.x / unit_columns % unit_rows;
  const long long expert = blockIdx.x / unit_columns / unit_rows;
  const int column = 64 * column_unit + COLUMNS * t, per_half = num_rows / 2;
  u32 values[2][WORDS];
  int rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int of_half = 32 * unit_row + 8 * warp + row, plain = 64 * unit_row + 16 * warp + 2 * row + half;
    rows[half] = gated              ? of_half < per_half ? (half ? first_1 : first_0) + of_half * row_step : -1
                 : plain < num_rows ? plain
                                    : -1;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) values[half][i] = 0;
    if (rows[half] < 0 || column >= num_columns) continue;
    const u8* from = quants + (expert * num_rows + rows[half]) * (static_cast<long long>(num_columns) * BITS / 8) +
                     column * BITS / 8;
#pragma unroll
    for (int i = 0; i < WORDS; i += 2) {
      const uint2 two = reinterpret_cast<const uint2*>(from)[i / 2];
      values[half][i] = two.x, values[half][i + 1] = two.y;
    }
  }
  u8* const unit = units + (((expert * (unit_columns / chunk) + column_unit / chunk) * unit_rows + unit_row) * chunk +
                            column_unit % chunk) *
                               UNIT_BYTES;
  bool special = false;
  if constexpr (BITS == 4) {
    // 16 bits of each step.
    const auto step = [&](int half, int number) { return values[half][number / 2] >> 16 * (number % 2); };
    uint2 early = place(step(0, 0), step(0, 1), step(1, 0), step(1, 1));
    uint2 late = place(step(0, 2), step(0, 3), step(1, 2), step(1, 3));
    reinterpret_cast<uint4*>(unit)[place_in_unit] = make_uint4(early.x, early.y, late.x, late.y);
  } else {
#pragma unroll
    for (int late = 0; late < 2; ++late) {
      u32 words[4];
#pragma unroll
      for (int odd = 0; odd < 2; ++odd)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u32 four = values[half][2 * late + odd];
          words[2 * odd + half] = place_bytes(four, 0) | place_bytes(four, 1) << 16;
#pragma unroll
          for (int i = 0; i < 4; ++i) special |= (four >> 8 * i & 127) == 127;
        }
      reinterpret_cast<uint4*>(unit + 2048 * late)[place_in_unit] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
  if (t < SCALES) {
    const int v = SCALES * column_unit + t, of_row = ceil_div(num_columns, 64 / SCALES), words = ceil_div(of_row, 4);
    u32 both = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (rows[half] < 0 || v >= of_row) continue;
      const int r = rows[half];
      const long long block = expert * ceil_div(num_rows, 128) + r / 128;
      u32 scale = scales[(block * words + v / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + v % 4];
      if (W_FMT == NVFP4) {
        if (scale > 126) *bad = 1, scale = 0;
        scale = CODES[scale];
      } else {
        special |= scale > LARGEST_FAST_SCALE;
      }
      both |= scale << 8 * half;
    }
    reinterpret_cast<u16*>(unit + QUANT_BYTES)[(8 * warp + row) * SCALES + t] = static_cast<u16>(both);
  }
  if (W_FMT != NVFP4 && special) marks[expert * unit_rows + unit_row] = 1;
}
