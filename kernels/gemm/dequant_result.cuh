// Results of the kernels that dequantize their weights in registers, for inclusion: from the accumulators of a tile to
// what is stored.
//
// Macros: W_FMT, OUT_FMT (FormatCode), OUT_TYPE (0 bf16, 1 fp16, 2 fp32; of a plain result), ACTIVATED (the result is
// activated and in OUT_FMT), GATED (and the weights are gate and up), FUNCTION (ActivationFunction.code),
// OUT_DEQUANTIZED (activated results as dequant_tokens.cu would make them), OUT_BY_ROWS (and in rows of bf16, for
// dequant_few.cu), ROW_SCALES, EXPERT_SCALES, BIAS (which exist), SCALED_TOKENS (tokens are 2^100 times their value),
// MAX_BLOCKS (tokens of a tile / 8), ALPHA, GATE_LIMIT, UP_LIMIT, UP_OFFSET, GATE_SOFTCAP, UP_SOFTCAP (of `Activation`;
// none of them if not defined).

#ifndef MOE_RUNTIME_DEQUANT_RESULT
#define MOE_RUNTIME_DEQUANT_RESULT

#include "activation.cuh"
#include "mbarrier.cuh"

static_assert(MAX_BLOCKS >= 1 && MAX_BLOCKS <= 20, "MAX_BLOCKS: tiles of 8 to 160 tokens");
static_assert(!OUT_BY_ROWS || (OUT_DEQUANTIZED && MAX_BLOCKS == 1),
              "OUT_BY_ROWS: dequantized results of one block of tokens");
static_assert(!OUT_DEQUANTIZED || ACTIVATED, "OUT_DEQUANTIZED: an activated result");
static_assert(!GATED || ACTIVATED, "GATED: a gated result is activated");
constexpr int TILE_TOKENS = 8 * MAX_BLOCKS;
constexpr int BLOCK_BYTES = 64 * 8 * 2;           // of 8 tokens and 64 columns
constexpr int UNIT_COLUMNS = GATED ? 32 : 64;     // of a result, from 64 weight rows
constexpr int TURNED_COLUMNS = UNIT_COLUMNS + 4;  // with padding, so that rows start in different banks
constexpr int TOKEN_LANES = UNIT_COLUMNS / 4;     // threads that share a token after the transposition
constexpr int STORED_BLOCKS = 16 / TOKEN_LANES;   // blocks of tokens that a warpgroup stores at a time
// Blocks of tokens that are transposed at a time.
constexpr int MOST_AT_A_TIME = (MAX_BLOCKS > 8 ? 2 : 1) * STORED_BLOCKS;

struct Problem {
  const u8* tokens;
  const u8* weights;
  const float* row_scale;
  const float* expert_scales;
  const float* bias;
  void* out;
  u8* out_scales;
  const int* out_scale_offsets;
  int columns;   // of the output
  int num_rows;  // of a weight: twice `columns` if gated
  int units;     // of 64 columns
  int unit_rows;
  int token_blocks;  // of all groups, in the dequantized tokens
  long long out_stride;
  int scales_per_expert;
  int gate_up_order;  // 1 gate | up, 2 up | gate, 3 interleaved; not read unless gated
};

// A tile of the output: `rows` tokens of a group from its token `local`, and `high` units of weight rows from `unit`.
struct Tile {
  int group, start, local, rows, expert, unit, high;
  u32 special_values;  // a bit for each unit of rows

  __device__ __forceinline__ long long token_block() const { return (start + 7 * group) / 8 + local / 8; }
};

// a / b for 0 <= a < 2^20 and b > 0: the instruction's quotient has a relative error below 2^-21.
__device__ __forceinline__ int fast_divided(int a, int b) { return static_cast<int>(__fdividef(a + 0.5f, b)); }

// Starts the copy of one value into shared memory while the tile is summed; `finish_copies` waits for a thread's
// copies.
__device__ __forceinline__ void copy_ahead(float* to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void finish_copies(int barrier) {
  asm volatile("cp.async.wait_all;" ::: "memory");
  asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
}

// Scales that the epilogue of a tile reads, one for each warpgroup.
struct alignas(8) TileScales {
  float rows[TILE_TOKENS];
  float experts[2];
  int scale_offset;

  // Row scales of this thread's two tokens in a block of 8.
  __device__ __forceinline__ float2 of_block(int block) const {
    return reinterpret_cast<const float2*>(rows)[4 * block + (threadIdx.x & 3)];
  }

  // With FEW a tile has fewer tokens than there are threads: the compiler leaves out the loop.
  template <bool FEW = false>
  __device__ __forceinline__ void copy(const Problem& p, const Tile& tile) {
    const int thread = threadIdx.x & 127;
    for (int i = thread; ROW_SCALES && i < (FEW ? min(tile.rows, TILE_TOKENS) : tile.rows); i += 128) {
      copy_ahead(rows + i, p.row_scale + tile.start + tile.local + i);
    }
    if (EXPERT_SCALES && thread < p.scales_per_expert) {
      copy_ahead(experts + thread, p.expert_scales + tile.expert * p.scales_per_expert + thread);
    }
    if (thread == 3 && p.out_scale_offsets) {
      copy_ahead(reinterpret_cast<float*>(&scale_offset),
                 reinterpret_cast<const float*>(p.out_scale_offsets + tile.group));
    }
  }
};

__device__ __forceinline__ float finished(const Problem& p, float acc, float row_scale, float expert_scale,
                                          int bias_at) {
  // Weights are 2^-126 times their value; scales and tokens carry factors that cancel most of that.
  if (W_FMT == NVFP4) acc = __fmul_rn(acc, SCALED_TOKENS ? 0x1p16f : 0x1p8f);
  if (ROW_SCALES) acc = __fmul_rn(acc, row_scale);
  if (EXPERT_SCALES) acc = __fmul_rn(acc, expert_scale);
  return BIAS ? __fadd_rn(acc, p.bias[bias_at]) : acc;
}

// x * sigmoid(slope), given `exponent`, -slope / ln 2.
__device__ __forceinline__ float times_sigmoid(float x, float exponent) {
  float power, inverse;  // e^(-slope); the instruction flushes denormals to 0
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
  // This instruction flushes below 2^-126, too: a slope under -87.3 gives 0; exact would be about -5e-37.
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(__fadd_rn(1.0f, power)));
  return __fmul_rn(x, inverse);
}

// x * sigmoid(ALPHA * gate).
__device__ __forceinline__ float silu(float gate, float x) {
  return times_sigmoid(x, __fmul_rn(gate, -ALPHA * 0x1.715476p+0f));
}

// The activation function of gate, or of up where there is no gate.
__device__ __forceinline__ float function_of(float x) {
  if (FUNCTION == RELU2) return squared_relu(x);
  if (FUNCTION == GELU) return gelu(x);
  if (FUNCTION == GELU_TANH) return times_sigmoid(x, __fmul_rn(gelu_tanh_slope(x), -0x1.715476p+0f));
  return silu(x, x);
}

__device__ __forceinline__ float activated(float gate, float up) {
#ifdef UP_LIMIT
  gate = gate > GATE_LIMIT ? GATE_LIMIT : gate;
  up = up > UP_LIMIT ? UP_LIMIT : (up < -UP_LIMIT ? -UP_LIMIT : up);
#endif
#ifdef UP_SOFTCAP
  up = softcapped(up, UP_SOFTCAP);
#endif
  if (UP_OFFSET != 0.0f) up = __fadd_rn(up, UP_OFFSET);
#ifdef GATE_SOFTCAP
  return __fmul_rn(silu(gate, softcapped(gate, GATE_SOFTCAP)), up);
#else
  return __fmul_rn(function_of(gate), up);
#endif
}

// An encode scale clamped to MAX_ENCODE_SCALE of number_formats.py.
__device__ __forceinline__ float clamped(float gsf) { return gsf > 0x1p100f ? 0x1p100f : gsf; }

// Bits of e4m3, rounded to nearest even; x is finite and at most 448.
__device__ __forceinline__ u32 e4m3_code(float x) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return pair & 255;
}

// Bits of e2m1, rounded to nearest, ties to even, and saturating; x is no NaN.
__device__ __forceinline__ u32 e2m1_code(float x) {
  const float a = fabsf(x);
  const u32 code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return code | ((__float_as_uint(x) >> 28) & 8);
}

__device__ __forceinline__ bool is_finite(float magnitude) { return __float_as_uint(magnitude) < 0x7F800000u; }

// The larger magnitude; NaN if either is NaN.
__device__ __forceinline__ float larger_magnitude(float a, float b) {
  float d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(fabsf(a)), "f"(fabsf(b)));
  return d;
}

// The largest magnitude of the values that share a scale: four in each of LANES neighbouring lanes.
template <int LANES>
__device__ __forceinline__ float largest_magnitude(const float4& h) {
  float amax = larger_magnitude(larger_magnitude(h.x, h.y), larger_magnitude(h.z, h.w));
#pragma unroll
  for (int lanes = 1; lanes < LANES; lanes *= 2)
    amax = larger_magnitude(amax, __shfl_xor_sync(0xFFFFFFFF, amax, lanes));
  return amax;
}

// The e8m0 scale of MXFP8 for values up to `amax`.
struct MxScale {
  u32 byte;
  bool finite;

  __device__ __forceinline__ MxScale(float amax) : finite(is_finite(amax)) {
    const float ideal =
        divide(fmaxf(finite ? amax : 0.0f, 0x1.a36e2ep-14f), 448.0f, 1.0f / 448.0f);  // amax at least 1e-4
    byte = finite ? (__float_as_uint(ideal) + 0x7FFFFF) >> 23 : 255;
  }

  __device__ __forceinline__ u32 codes(const float4& h) const {
    if (!finite) return 0;
    const float factor = __uint_as_float((254 - byte) << 23);
    return e4m3_code(__fmul_rn(h.x, factor)) | e4m3_code(__fmul_rn(h.y, factor)) << 8 |
           e4m3_code(__fmul_rn(h.z, factor)) << 16 | e4m3_code(__fmul_rn(h.w, factor)) << 24;
  }
};

// How NVFP4 values of a block with a given e4m3 scale are quantized and dequantized again.
struct alignas(16) OfScale {
  float factor;       // applied to values before they are rounded to e2m1
  float dequantized;  // factor of e2m1 values that gives tokens, 2^100 times their value
  u32 sign;           // mask of the sign bit
  u32 unused;
};

// In shared memory, for all results: their encode scale, and an entry for each scale that a block can have.
struct Requantization {
  float gsf;
  OfScale of_scale[OUT_FMT == NVFP4 && ACTIVATED ? 128 : 1];

  __device__ __forceinline__ void prepare(float gsf, int code) {
    float scale, unused;
    e4m3_pair(code, scale, unused);  // 127 is NaN, for values that are not finite
    // Values too small for any scale become zeros without signs.
    const bool none = code == 0 || code == 127;
    of_scale[code] = {none ? 0.0f : __fdiv_rn(gsf, scale), __fmul_rn(scale, 0x1p100f), none ? 0u : 0x80000000u, 0u};
  }

  // The scale code for values up to `amax`, without the sign of a negative encode scale. With a negative one, the codes
  // of the values have the opposite sign, as does the row scale.
  __device__ __forceinline__ u32 scale_code(float amax) const {
    const u32 code = e4m3_code(fminf(divide(__fmul_rn(gsf, amax), 6.0f, 1.0f / 6.0f), 448.0f)) & 127;
    return is_finite(amax) ? code : 127;
  }
};

// x rounded to e2m1, ties to even, times OfScale::dequantized.
__device__ __forceinline__ float rounded_to_e2m1(float x, const OfScale& of_scale) {
  // e2m1 values from 2^e on are 2^(e-1) apart, those below 1 as far apart as from 1 on: like fp32 values from 2^(e+22)
  // on.
  const float magnitude = fminf(fabsf(x), 6.0f);
  const float power = __uint_as_float(max(__float_as_uint(magnitude) & 0x7F800000u, 0x3F800000u));
  const float rounded = __fmaf_rn(power, -0x1.8p22f, __fmaf_rn(power, 0x1.8p22f, magnitude));
  return __uint_as_float(__float_as_uint(__fmul_rn(rounded, of_scale.dequantized)) |
                         (__float_as_uint(x) & of_scale.sign));
}

// Stores four columns of a token: in the layout of dequant_tokens.cu, or side by side.
__device__ __forceinline__ void store_dequantized(u8* to, bool live, u32 low, u32 high) {
  if (!live) return;
  if (OUT_BY_ROWS) {
    *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
    return;
  }
  *reinterpret_cast<u32*>(to) = low;
  *reinterpret_cast<u32*>(to + 128) = high;
}

// Quantizes four columns of a token and stores them dequantized at `to`. Lanes that share a scale are neighbours.
__device__ __forceinline__ void requantize_and_dequantize(const Requantization& with, u8* to, bool live, float4 h) {
  if (OUT_FMT == BF16) {
    store_dequantized(to, live, pack_bf16(h.x, h.y), pack_bf16(h.z, h.w));
  } else if (OUT_FMT == NVFP4) {
    const OfScale of_scale = with.of_scale[with.scale_code(largest_magnitude<4>(h))];
    auto pair = [&](float low, float high) {
      return pack_bf16(rounded_to_e2m1(__fmul_rn(low, of_scale.factor), of_scale),
                       rounded_to_e2m1(__fmul_rn(high, of_scale.factor), of_scale));
    };
    store_dequantized(to, live, pair(h.x, h.y), pair(h.z, h.w));
  } else {
    const MxScale mx(largest_magnitude<8>(h));
    const u32 codes = mx.codes(h), scale = e8m0_pair(mx.byte);
    store_dequantized(to, live, e4m3_decoded(codes, scale), e4m3_decoded(codes >> 16, scale));
  }
}

// Quantizes four columns from `column` on of token `local` of a group, and stores codes and scales.
__device__ __forceinline__ void requantize(const Problem& p, const Tile& tile, const TileScales& scales,
                                           const Requantization& with, int local, bool live, int column, float4 h) {
  const long long position = tile.start + local;
  if (OUT_FMT == BF16) {
    u16* to = static_cast<u16*>(p.out) + position * p.columns + column;
    if (live) *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16(h.x, h.y), pack_bf16(h.z, h.w));
    return;
  }
  const long long scale_row = (tile.start / 128 + static_cast<long long>(scales.scale_offset)) * 128 + local;
  if (OUT_FMT == NVFP4) {
    const u32 code = with.scale_code(largest_magnitude<4>(h));
    const OfScale of_scale = with.of_scale[code];
    if (of_scale.sign == 0) h = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float factor = of_scale.factor;
    u32 codes = e2m1_code(__fmul_rn(h.x, factor)) | e2m1_code(__fmul_rn(h.y, factor)) << 4 |
                e2m1_code(__fmul_rn(h.z, factor)) << 8 | e2m1_code(__fmul_rn(h.w, factor)) << 12;
    codes |= __shfl_down_sync(0xFFFFFFFF, codes, 1) << 16;
    if (live && threadIdx.x % 2 == 0) {
      *reinterpret_cast<u32*>(static_cast<u8*>(p.out) + position * (p.columns / 2) + column / 2) = codes;
    }
    if (live && threadIdx.x % 4 == 0) {
      p.out_scales[swizzled_offset(scale_row, column / 16, (p.columns + 15) / 16)] = code;
    }
  } else {
    const MxScale mx(largest_magnitude<8>(h));
    if (live) *reinterpret_cast<u32*>(static_cast<u8*>(p.out) + position * p.columns + column) = mx.codes(h);
    if (live && threadIdx.x % 8 == 0) {
      p.out_scales[swizzled_offset(scale_row, column / 32, (p.columns + 31) / 32)] = mx.byte;
    }
  }
}

// Two columns of a plain result.
__device__ __forceinline__ void store_plain(void* to, float c0, float c1) {
  if (OUT_TYPE == 2) {
    *static_cast<float2*>(to) = make_float2(c0, c1);
  } else if (OUT_TYPE == 1) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(c1), "f"(c0));
    *static_cast<u32*>(to) = pair;
  } else {
    *static_cast<u32*>(to) = pack_bf16(c0, c1);
  }
}

// The first of a thread's two tokens in a block of 8. Accumulators c[0] and c[1] belong to these tokens and one weight
// row. c[2] and c[3] belong to the same tokens and the next row of a plain weight, or to up where c[0] and c[1] belong
// to gate.
__device__ __forceinline__ int first_token() { return (threadIdx.x & 3) * 2; }

// All loops are unrolled, because in a real loop accumulators would have to move between registers. The code for each
// value is short, so that all of it fits into the instruction cache.
template <int BLOCKS>
__device__ __forceinline__ void finish_plain(const Problem& p, const Tile& tile, const TileScales& scales, int unit,
                                             const float (&acc)[4 * BLOCKS]) {
  const int thread = threadIdx.x & 127, column = unit * 64 + thread / 32 * 16 + (thread & 31) / 4 * 2;
  const int bias_at = tile.expert * p.num_rows + (column < p.columns ? column : 0);
  const int live = column < p.columns ? tile.rows - first_token() : 0;
  const long long stride = p.out_stride * (OUT_TYPE == 2 ? 4 : 2);
  const long long position = tile.start + tile.local + first_token();
  u8* to = static_cast<u8*>(p.out) + position * stride + column * (OUT_TYPE == 2 ? 4 : 2);
  const float expert_scale = scales.experts[0];
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block) {
    const float* c = acc + 4 * block;
    const float2 row_scales = scales.of_block(block);
    const float c0 = finished(p, c[0], row_scales.x, expert_scale, bias_at);
    const float c1 = finished(p, c[1], row_scales.y, expert_scale, bias_at);
    const float c2 = finished(p, c[2], row_scales.x, expert_scale, bias_at + 1);
    const float c3 = finished(p, c[3], row_scales.y, expert_scale, bias_at + 1);
    if (8 * block < live) store_plain(to, c0, c2);
    if (8 * block + 1 < live) store_plain(to + stride, c1, c3);
    to += 8 * stride;
  }
}

// The activation of 8 * STEP tokens at a time, transposed through `turned` so that a thread has four columns of one
// token.
template <int BLOCKS>
__device__ __forceinline__ void finish_activated(const Problem& p, const Tile& tile, const TileScales& scales,
                                                 const Requantization& with, int unit, const float (&acc)[4 * BLOCKS],
                                                 float (*turned)[TURNED_COLUMNS]) {
  constexpr int STEP = BLOCKS % MOST_AT_A_TIME == 0 ? MOST_AT_A_TIME : BLOCKS % 2 ? 1 : 2;
  const int warpgroup = threadIdx.x / 128, thread = threadIdx.x & 127, warp = thread / 32, lane = thread & 31;
  const float first_scale = scales.experts[0], up_scale = GATED ? scales.experts[p.scales_per_expert > 1] : first_scale;
  // This thread has a column of gate and up, or two columns.
  constexpr int OWN = UNIT_COLUMNS / 32;
  const int bias_base = tile.expert * p.num_rows, column = unit * UNIT_COLUMNS + warp * 8 * OWN + lane / 4 * OWN;
  int first_row = column, second_row = GATED ? column : column + 1;
  if (GATED && p.gate_up_order == 3) first_row = 2 * column, second_row = 2 * column + 1;
  if (GATED && p.gate_up_order == 1) second_row += p.columns;
  if (GATED && p.gate_up_order == 2) first_row += p.columns;
  if (column >= p.columns) first_row = second_row = 0;
  float* turned_to = turned[first_token()] + warp * 8 * OWN + lane / 4 * OWN;
  // The columns of this thread after the transposition.
  const int token = thread / TOKEN_LANES, first = unit * UNIT_COLUMNS + thread % TOKEN_LANES * 4;
  const int live = first < p.columns ? tile.rows - token : 0;
  const float4* of_token = reinterpret_cast<const float4*>(turned[token] + thread % TOKEN_LANES * 4);
  const long long out_block = static_cast<long long>(first / 64) * p.token_blocks + tile.token_block() + token / 8;
  u8* out =
      static_cast<u8*>(p.out) + out_block * BLOCK_BYTES + first % 16 / 2 * 128 + token % 8 * 16 + first % 64 / 16 * 4;
  if (OUT_BY_ROWS) {
    out = static_cast<u8*>(p.out) + (static_cast<long long>(tile.start + tile.local + token) * p.columns + first) * 2;
  }
#pragma unroll
  for (int block = 0; block < BLOCKS; block += STEP) {
    float h[2 * STEP * OWN];
#pragma unroll
    for (int b = 0; b < STEP; ++b) {
      const float* c = acc + 4 * (block + b);
      const float2 row_scales = scales.of_block(block + b);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float row_scale = i == 0 ? row_scales.x : row_scales.y;
        const float one = finished(p, c[i], row_scale, first_scale, bias_base + first_row);
        const float two = finished(p, c[2 + i], row_scale, up_scale, bias_base + second_row);
        if constexpr (GATED) {
          h[2 * b + i] = activated(one, two);
        } else {
          h[2 * (2 * b + i)] = function_of(one), h[2 * (2 * b + i) + 1] = function_of(two);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * STEP; ++i) {
      float* to = turned_to + (i / 2 * 8 + i % 2) * TURNED_COLUMNS;
      if constexpr (GATED) *to = h[i];
      else *reinterpret_cast<float2*>(to) = make_float2(h[2 * i], h[2 * i + 1]);
    }
    asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
    if (STEP >= STORED_BLOCKS || warp < 2) {
#pragma unroll
      for (int at = 0; at < STEP; at += STORED_BLOCKS) {
        const bool inside = 8 * (block + at) < live;
        const float4 h = of_token[at * 8 * TURNED_COLUMNS / 4];
        if (OUT_DEQUANTIZED) {
          requantize_and_dequantize(with, out + (block + at) * BLOCK_BYTES, inside, h);
        } else {
          requantize(p, tile, scales, with, tile.local + 8 * (block + at) + token, inside, first, h);
        }
      }
    }
    asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
  }
}

template <int BLOCKS>
__device__ __forceinline__ void finish(const Problem& p, const Tile& tile, const TileScales& scales,
                                       const Requantization& with, int warpgroup, int unit,
                                       const float (&acc)[4 * BLOCKS], float (*turned)[TURNED_COLUMNS]) {
  finish_copies(1 + warpgroup);
  if (ACTIVATED) {
    finish_activated<BLOCKS>(p, tile, scales, with, unit, acc, turned);
  } else {
    finish_plain<BLOCKS>(p, tile, scales, unit, acc);
    asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
  }
}

#endif
