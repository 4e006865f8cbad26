// CUDA C++ as far as the kernels use it, for a compiler of the CPU. The instructions that they name in `asm` are in
// instructions.h.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "scheduler.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)
#define threadIdx (emulator::thread->index)
#define blockIdx (emulator::thread->block)
#define blockDim (emulator::thread->block_size)
#define gridDim (emulator::thread->grid)

using std::max;
using std::min;

inline unsigned max(unsigned a, int b) { return std::max(a, unsigned(b)); }

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// Warps.
template <class T>
inline const Long* meet(const char* what, T value) {
  static_assert(sizeof(T) <= 8);
  Long bits = 0;
  memcpy(&bits, &value, sizeof value);
  return emulator::meet(what, bits);
}
template <class T>
inline T brought(const Long* values, unsigned lane) {
  T value;
  memcpy(&value, values + lane, sizeof value);
  return value;
}
inline unsigned lane_of_warp() { return threadIdx.x % 32; }
inline void all_lanes(unsigned mask) {
  if (mask != 0xFFFFFFFFu) emulator::fail("mask %08x: only whole warps are emulated", mask);
}
inline void __syncwarp() { emulator::meet("__syncwarp", 0); }
template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane) {
  all_lanes(mask);
  return brought<T>(meet("__shfl_sync", value), lane % 32u);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned by) {
  all_lanes(mask);
  const unsigned lane = lane_of_warp();
  return brought<T>(meet("__shfl_up_sync", value), lane >= by ? lane - by : lane);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned by) {
  all_lanes(mask);
  const unsigned lane = lane_of_warp();
  return brought<T>(meet("__shfl_down_sync", value), lane + by < 32 ? lane + by : lane);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, unsigned by) {
  all_lanes(mask);
  return brought<T>(meet("__shfl_xor_sync", value), lane_of_warp() ^ by);
}
inline unsigned __ballot_sync(unsigned mask, bool flag) {
  all_lanes(mask);
  const Long* values = meet("__ballot_sync", flag);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= unsigned(values[lane] & 1) << lane;
  return bits;
}
inline int __reduce_add_sync(unsigned mask, int value) {
  all_lanes(mask);
  const Long* values = meet("__reduce_add_sync", value);
  int sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += int(values[lane]);
  return sum;
}
inline int __any_sync(unsigned mask, bool flag) { return __ballot_sync(mask, flag) != 0; }
inline int __all_sync(unsigned mask, bool flag) { return __ballot_sync(mask, flag) == 0xFFFFFFFFu; }
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value) {
  all_lanes(mask);
  const Long* values = meet("__match_any_sync", value);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= unsigned(brought<T>(values, lane) == value) << lane;
  return bits;
}
template <class T, class Of>
inline T reduce(const char* what, unsigned mask, T value, Of of) {
  all_lanes(mask);
  const Long* values = meet(what, value);
  T result = brought<T>(values, 0);
  for (int lane = 1; lane < 32; ++lane) result = of(result, brought<T>(values, lane));
  return result;
}
template <class T>
inline T __reduce_or_sync(unsigned mask, T value) {
  return reduce("__reduce_or_sync", mask, value, [](T a, T b) { return a | b; });
}
template <class T>
inline T __reduce_max_sync(unsigned mask, T value) {
  return reduce("__reduce_max_sync", mask, value, [](T a, T b) { return a > b ? a : b; });
}
template <class T>
inline T __reduce_add_sync(unsigned mask, T value) {
  return reduce("__reduce_add_sync", mask, value, [](T a, T b) { return a + b; });
}

// Blocks and memory.
inline void __syncthreads() { emulator::bar_sync(0, blockDim.x); }
inline int __syncthreads_or(int flag) { return emulator::bar_sync(0, blockDim.x, flag != 0); }
inline void __threadfence() {}
inline void __trap() { emulator::fail("gave up"); }
template <class T>
inline T __ldcg(const T* at) {
  return *at;
}
template <class T>
inline T __ldg(const T* at) {
  return *at;
}
template <class T, class V>
inline T atomicAdd(T* at, V value) {
  emulator::look("an atomic addition", true);
  const T before = *at;
  *at = before + value;
  return before;
}
template <class T, class V>
inline T atomicOr(T* at, V value) {
  emulator::look("an atomic or", true);
  const T before = *at;
  *at = before | value;
  return before;
}
template <class T, class V>
inline T atomicCAS(T* at, V expected, V value) {
  emulator::look("an atomic exchange", true);
  const T before = *at;
  if (before == static_cast<T>(expected)) *at = value;
  return before;
}
inline size_t __cvta_generic_to_shared(const void* at) { return emulator::to_shared(at); }

// Numbers.
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
// As far off as the instruction may be.
inline float __fdividef(float a, float b) { return std::nextafter(std::nextafter(a / b, 0.0f), 0.0f); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline float __expf(float x) { return std::exp(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const Long bytes = Long(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned which = selector >> 4 * i & 0xF, byte = bytes >> 8 * (which & 7) & 0xFF;
    result |= (which & 8 ? (byte & 0x80 ? 0xFFu : 0u) : byte) << 8 * i;
  }
  return result;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return (Long(high) << 32 | low) >> by % 32;
}
inline unsigned __vmaxu2(unsigned a, unsigned b) { return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16; }

// A kernel called with the addresses of its arguments.
template <class... Arguments, size_t... I>
inline void call_kernel(void (*kernel)(Arguments...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<Arguments*>(arguments[I])...);
}
template <class... Arguments>
inline void call_kernel(void (*kernel)(Arguments...), void** arguments) {
  call_kernel(kernel, arguments, std::index_sequence_for<Arguments...>());
}
