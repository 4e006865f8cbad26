// From the sums of a tile to what is stored, for inclusion by tma_gemm.cu.

#ifndef MOE_RUNTIME_TMA_EPILOGUE
#define MOE_RUNTIME_TMA_EPILOGUE

#include "tma_sizes.cuh"

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 word;
  if (OUT == 1) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  }
  return word;
}

// x * sigmoid(slope), given `negative`, -slope.
__device__ __forceinline__ float times_sigmoid(float x, float negative) {
  float inverse;
  asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + __expf(negative)));
  return __fmul_rn(x, inverse);
}

// The activation function of gate, or of up where there is no gate.
__device__ __forceinline__ float function_of(float x, float alpha) {
  if (FUNCTION == RELU2) return squared_relu(x);
  if (FUNCTION == GELU) return gelu(x);
  return times_sigmoid(x, FUNCTION == GELU_TANH ? -gelu_tanh_slope(x) : -alpha * x);
}

// Both limits are infinite where there is none.
__device__ __forceinline__ float activated(float gate, float up, float alpha, float gate_limit, float up_limit,
                                           float up_offset) {
  gate = gate > gate_limit ? gate_limit : gate;
  up = up > up_limit ? up_limit : (up < -up_limit ? -up_limit : up);
#ifdef UP_SOFTCAP
  up = softcapped(up, UP_SOFTCAP);
#endif
#ifdef GATE_SOFTCAP
  float y = times_sigmoid(softcapped(gate, GATE_SOFTCAP), -alpha * gate);
#else
  float y = function_of(gate, alpha);
#endif
  return __fmul_rn(y, __fadd_rn(up, up_offset));
}

// The largest word in the four lanes that hold a row.
__device__ __forceinline__ u32 max_of_row(u32 x) {
  x = max(x, __shfl_xor_sync(~0u, x, 1));
  return max(x, __shfl_xor_sync(~0u, x, 2));
}

// A thread of a math warpgroup holds rows `lane / 4` and `lane / 4 + 8` of its warp's 16, and two columns of each 8:
// r[4j], r[4j + 1] of the first row, r[4j + 2], r[4j + 3] of the second, columns 8j + lane % 4 * 2 and the next.

// Writes 16 rows of 128 bytes from a warp's staging memory; only `bytes` of a row belong to the result.
__device__ __forceinline__ void write_rows(const u8* staging, u8* out, long long stride, int rows, int bytes) {
  int lane = threadIdx.x % 32, chunk = lane % 8;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int row = i * 4 + lane / 8;
    int4 value = *(const int4*)(staging + row * 128 + ((chunk ^ row % 8) << 4));
    if (row < rows && chunk * 16 < bytes) *(int4*)(out + row * stride + chunk * 16) = value;
  }
  __syncwarp();
}

// Stores COLUMNS columns of the warp's 16 rows from `r[FIRST]` on; `columns` of them exist.
template <int COLUMNS, int FIRST = 0, int N>
__device__ __forceinline__ void store(const float (&r)[N], u8* staging, u8* out, long long stride, int rows,
                                      int columns) {
  constexpr int SIZE = OUT == 2 ? 4 : 2, GROUPS = 16 / SIZE;  // groups of 8 columns in 128 bytes
  int lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
#pragma unroll
  for (int part = 0; part < COLUMNS / 8 / GROUPS; ++part) {
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) {
      int i = FIRST + 4 * (part * GROUPS + j);
      if (OUT == 2) {
        u32 at = row * 128 + (((2 * j + quad / 2) ^ row) << 4) + quad % 2 * 8;
        *(float2*)(staging + at) = make_float2(r[i], r[i + 1]);
        *(float2*)(staging + at + 1024) = make_float2(r[i + 2], r[i + 3]);
      } else {
        u32 at = row * 128 + ((j ^ row) << 4) + quad * 4;
        *(u32*)(staging + at) = pack(r[i], r[i + 1]);
        *(u32*)(staging + at + 1024) = pack(r[i + 2], r[i + 3]);
      }
    }
    write_rows(staging, out + part * 128, stride, rows, columns * SIZE - part * 128);
  }
}

// Quantizes numbers of a block whose largest magnitude has these bits, as `quantize.quantize_tile` does.
struct Quantizer {
  bool poisoned;  // by NaN or Inf
  float scale, inverse;

  __device__ __forceinline__ explicit Quantizer(u32 bits) {
    poisoned = bits >= 0x7F800000;
    u32 amax = poisoned ? 0 : bits;
    scale = __fdiv_rn(__uint_as_float(max(amax, 0x38D1B717)), 448.0f);  // amax at least 1e-4
    inverse = __frcp_rn(scale);
  }

  __device__ __forceinline__ float stored_scale() const { return poisoned ? __uint_as_float(0x7FC00000) : scale; }

  __device__ __forceinline__ u16 codes(float low, float high) const {
    u16 codes;
    low = divide(low, scale, inverse), high = divide(high, scale, inverse);
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return poisoned ? (u16)0 : codes;
  }
};

// Quantizes 128 columns of each row from `r[FIRST]` on, one block, and stores `columns` of them. What is past them
// counts for nothing: zeros of weights times Inf are NaN. `scales` is that of the first row.
template <int FIRST, int N>
__device__ __forceinline__ void store_quantized(const float (&r)[N], u8* staging, u8* out, long long stride, int rows,
                                                int columns, float* scales, int scale_stride) {
  int lane = threadIdx.x % 32, quad = lane % 4;
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    u32 bits = 0;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      if (SHORT_BLOCKS && 8 * j >= columns) break;
      bits = max(bits, __float_as_uint(r[FIRST + 4 * j + 2 * second]) & 0x7FFFFFFF);
      bits = max(bits, __float_as_uint(r[FIRST + 4 * j + 2 * second + 1]) & 0x7FFFFFFF);
    }
    Quantizer quantizer(max_of_row(bits));
    int row = lane / 4 + 8 * second;
    if (quad == 0 && row < rows) scales[row * scale_stride] = quantizer.stored_scale();
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      u16 codes = quantizer.codes(r[FIRST + 4 * j + 2 * second], r[FIRST + 4 * j + 2 * second + 1]);
      u32 at = row * 128 + ((j / 2 ^ row % 8) << 4) + j % 2 * 8 + quad * 2;
      *(u16*)(staging + at) = codes;
    }
  }
  write_rows(staging, out, stride, rows, SHORT_BLOCKS ? columns : 128);
}

// acc * row_scale * expert_scale + bias, one after the other.
struct Extras {
  const float *row_scale, *expert_scales, *bias;
  int scales_per_expert;
};

// Whose sum half `h` of a tile has for column `n` of the result: the row of the expert's weight, and whether it is of
// up.
struct WeightRow {
  int row, up;

  __device__ __forceinline__ WeightRow(int n, int h, int columns) : row(n), up(h) {
    if (GATED) {
      row = ORDER == INTERLEAVED ? 2 * n + h : n + (h == (ORDER == GATE_UP) ? columns : 0);
    } else if (ORDER == INTERLEAVED) {
      up = n % 2;
    } else {
      up = (n >= columns / 2) == (ORDER == GATE_UP);
    }
  }
};

// One sum of half `h` of a tile and column `n` of the result.
__device__ __forceinline__ float with_extras(float sum, const Extras& x, int row, int expert, int n, int h,
                                             int columns) {
  int num_rows = GATED ? 2 * columns : columns;
  WeightRow of(n, h, columns);
  float r = x.row_scale ? x.row_scale[row] : 1.0f, s = 1.0f;
  if (x.expert_scales)
    s = x.expert_scales[(long long)expert * x.scales_per_expert + (x.scales_per_expert == 2 ? of.up : 0)];
  float b = x.bias && n < columns ? x.bias[(long long)expert * num_rows + of.row] : -0.0f;
  return __fadd_rn(__fmul_rn(__fmul_rn(sum, r), s), b);
}

// Of NUMBER sums from FIRST on, PART of which are of gate before as many of up.
template <int FIRST = 0, int NUMBER = SUMS, int PART = 64>
__device__ __forceinline__ void apply_extras(float (&acc)[SUMS], const Extras& x, int row, int last_row, int expert,
                                             int column, int columns) {
  int num_rows = GATED ? 2 * columns : columns, quad = threadIdx.x % 4;
  float r0 = x.row_scale ? x.row_scale[min(row, last_row)] : 1.0f;
  float r1 = x.row_scale ? x.row_scale[min(row + 8, last_row)] : 1.0f;
  const float* scales = x.expert_scales ? x.expert_scales + (long long)expert * x.scales_per_expert : nullptr;
  const float* bias = x.bias ? x.bias + (long long)expert * num_rows : nullptr;
#pragma unroll
  for (int j = 0; j < NUMBER / 4; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      int n = column + 8 * (GATED ? j % (PART / 4) : j) + 2 * quad + c;
      WeightRow of(n, j / (PART / 4), columns);
      float s = scales ? scales[x.scales_per_expert == 2 ? of.up : 0] : 1.0f;
      float b = bias && n < columns ? bias[of.row] : -0.0f;
      float &low = acc[FIRST + 4 * j + c], &high = acc[FIRST + 4 * j + 2 + c];
      low = __fadd_rn(__fmul_rn(__fmul_rn(low, r0), s), b);
      high = __fadd_rn(__fmul_rn(__fmul_rn(high, r1), s), b);
    }
  }
}

// --- block scales of 128 columns, of which either block of a cluster has 64 ------------------------------------------

// What a warp and the one of the same number in the other block tell each other of a tile: the largest bits of its
// rows. Two tiles in turn use one of two places. A block writes into the next but one only when it knows the next of
// the other block, which then has read this one.
struct Maxima {
  const u32* here;                            // of this thread's row
  u32 there, arrived, arrived_there, parity;  // shared-memory addresses: in the other block, and of barriers
};

__device__ __forceinline__ void tell_largest(u32 there, u32 bits, u32 arrived_there) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(there), "r"(bits),
               "r"(arrived_there)
               : "memory");
}

#if ROWS > 128

// Makes the bits of each of a thread's first `number` rows, which lie 8 apart, the larger of this block's and of the
// other one's. The four lanes of a row have the same.
__device__ __forceinline__ void largest_of_pair(const Maxima& x, u32 (&bits)[4], int number) {
  int lane = threadIdx.x % 32;
  if (lane == 0) barrier_expect(x.arrived, number * 8 * 4);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (lane % 4 == 0 && i < number) tell_largest(x.there + 8 * 4 * i, bits[i], x.arrived_there);
  barrier_wait(x.arrived, x.parity);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < number) bits[i] = max(bits[i], x.here[8 * i]);
}

// Quantizes 64 columns of each row from `r[FIRST]` on and stores `columns` of them. `bits` are the largest of a
// thread's rows, `scales` that of the first row or null.
template <int FIRST, int N>
__device__ __forceinline__ void store_quantized_64(const float (&r)[N], const u32 (&bits)[4], u8* staging, u8* out,
                                                   long long stride, int rows, int columns, float* scales,
                                                   int scale_stride) {
  int lane = threadIdx.x % 32, quad = lane % 4;
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    Quantizer quantizer(bits[FIRST / 32 + second]);
    int row = lane / 4 + 8 * second;
    if (quad == 0 && row < rows && scales) scales[row * scale_stride] = quantizer.stored_scale();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      u16 codes = quantizer.codes(r[FIRST + 4 * j + 2 * second], r[FIRST + 4 * j + 2 * second + 1]);
      u32 at = row * 128 + ((j / 2 ^ row % 8) << 4) + j % 2 * 8 + quad * 2;
      *(u16*)(staging + at) = codes;
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int row = i * 8 + lane / 4;
    int4 value = *(const int4*)(staging + row * 128 + ((quad ^ row % 8) << 4));
    if (row < rows && quad * 16 < columns) *(int4*)(out + row * stride + quad * 16) = value;
  }
  __syncwarp();
}

#endif

// --- epilogue of few rows --------------------------------------------------------------------------------------------

constexpr int ROW_THREADS = FEW ? 128 / BM : 1;  // that have a row

// The larger of this block's and of the other one's bits of a row.
__device__ __forceinline__ u32 largest_of_pair(const Maxima& x, u32 bits) {
  int lane = threadIdx.x % 32;
  if (lane == 0) barrier_expect(x.arrived, 32 / ROW_THREADS * 4);
  if (lane % ROW_THREADS == 0) tell_largest(x.there, bits, x.arrived_there);
  barrier_wait(x.arrived, x.parity);
  return max(bits, *x.here);
}

__device__ __forceinline__ void sync_warpgroup() { asm volatile("bar.sync %0, 128;" ::"r"(1) : "memory"); }

// Writes the sums of a tile to shared memory by rows, as [BM, SUMS_STRIDE]. A thread has them by weight rows.
__device__ __forceinline__ void share_sums(const float (&acc)[SUMS], float* sums) {
  int lane = threadIdx.x % 32;
  float* of_lane = sums + lane % 4 * 2 * SUMS_STRIDE + threadIdx.x / 32 * 16 + lane / 4;
  sync_warpgroup();  // those of the last tile have been read
#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    int half = i / (SUMS / 2), j = i % (SUMS / 2) / 4;
    of_lane[(8 * j + i % 2) * SUMS_STRIDE + half * 64 + i / 2 % 2 * 8] = acc[i];
  }
  sync_warpgroup();
}

// Writes the rest of a row of `bytes` from a thread's part of it on.
template <int WORDS>
__device__ __forceinline__ void write_words(u8* to, const u32 (&words)[WORDS], int bytes) {
  if (WORDS == 1 && bytes > 0) *(u32*)to = words[0];
  if (WORDS == 2 && bytes > 0) *(uint2*)to = make_uint2(words[0], words[WORDS - 1]);
#pragma unroll
  for (int i = 0; i + 3 < WORDS; i += 4)
    if (4 * i < bytes) *(uint4*)(to + 4 * i) = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
}

// The rest of a tile: each thread has OF_THREAD neighbouring columns of a row. `out_scales` null stores none.
__device__ __forceinline__ void store_few(const float* sums, const Extras& extras, const Tile& tile, int last_row,
                                          int columns, float alpha, float gate_limit, float up_limit, float up_offset,
                                          u8* out, long long out_stride, float* out_scales, const Maxima& maxima) {
  constexpr int OF_THREAD = TILE_COLUMNS / ROW_THREADS, SIZE = OUT == 3 ? 1 : (OUT == 2 ? 4 : 2), PARTS = GATED ? 2 : 1;
  int row = threadIdx.x / ROW_THREADS, first = threadIdx.x % ROW_THREADS * OF_THREAD;
  long long position = tile.start + row;
  // A cluster may reach past the last column; that is not stored.
  int width = row < tile.rows ? min(columns - tile.column, TILE_COLUMNS) : 0;
  float x[PARTS][OF_THREAD];
#pragma unroll
  for (int h = 0; h < PARTS; ++h) {
#pragma unroll
    for (int i = 0; i < OF_THREAD; ++i) {
      x[h][i] = sums[row * SUMS_STRIDE + h * TILE_COLUMNS + first + i];
      if (EXTRAS) {
        int of_row = min((int)position, last_row);
        x[h][i] = with_extras(x[h][i], extras, of_row, tile.expert, tile.column + first + i, h, columns);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < OF_THREAD; ++i) {
    if (GATED) x[0][i] = activated(x[0][i], x[PARTS - 1][i], alpha, gate_limit, up_limit, up_offset);
    if (ACTIVATED && !GATED) x[0][i] = function_of(x[0][i], alpha);
  }
  u32 words[OF_THREAD * SIZE / 4];
  if (OUT == 3) {
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < OF_THREAD; ++i)
      if (!SHORT_BLOCKS || first + i < width) bits = max(bits, __float_as_uint(x[0][i]) & 0x7FFFFFFF);
#pragma unroll
    for (int step = 1; step < ROW_THREADS; step *= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, step));
    if (PAIRED) bits = largest_of_pair(maxima, bits);
    Quantizer quantizer(bits);
    if (first == 0 && width > 0 && out_scales)
      out_scales[position * blocks_of(columns) + tile.column / 128] = quantizer.stored_scale();
#pragma unroll
    for (int i = 0; i < OF_THREAD; i += 4)
      words[i / 4] = quantizer.codes(x[0][i], x[0][i + 1]) | (u32)quantizer.codes(x[0][i + 2], x[0][i + 3]) << 16;
  } else if (OUT == 2) {
#pragma unroll
    for (int i = 0; i < OF_THREAD; ++i) words[i * SIZE / 4] = __float_as_uint(x[0][i]);
  } else {
#pragma unroll
    for (int i = 0; i < OF_THREAD; i += 2) words[i * SIZE / 4] = pack(x[0][i], x[0][i + 1]);
  }
  write_words(out + (position * out_stride + tile.column + first) * SIZE, words, (width - first) * SIZE);
}

#endif
