// What the kernels name in `asm`, as functions: outputs first, then inputs, then the numbers in the text. A name is
// that of the instruction and of a special register that it reads with each run of other characters as one `_`, or
// several such with `__` between them.

#pragma once

#include "device.h"

namespace ptx {

// Memory that other ranks write.
inline void ld_acquire_sys_global_s32(int& value, const int* at) { emulator::look("what a peer writes"), value = *at; }
inline void ld_relaxed_sys_global_s32(int& value, const int* at) { emulator::look("what a peer writes"), value = *at; }
inline void st_relaxed_sys_global_s32(int* at, int value) { emulator::look("its turn", true), *at = value; }
inline void st_release_sys_global_s32(int* at, int value) { emulator::look("its turn", true), *at = value; }
inline void atom_add_acq_rel_gpu_global_s32(int& before, int* at, int by) { before = atomicAdd(at, by); }
inline void mov_u64_globaltimer(long long& now) { now = emulator::clock_ns(); }
inline void ld_acquire_gpu_global_u32(unsigned& value, const unsigned* at) {
  emulator::look("what another kernel counts"), value = *at;
}
inline void nanosleep_u32(unsigned) {}
inline void red_relaxed_gpu_global_add_u32(unsigned* at, unsigned by) { atomicAdd(at, by); }
inline void ld_relaxed_gpu_global_u32(unsigned& value, const unsigned* at) {
  emulator::look("what another block counts"), value = *at;
}
inline void fence_acq_rel_sys() {}
inline void fence_acq_rel_gpu() {}
inline void fence_proxy_async_shared_cta() {}
inline void fence_proxy_async_global() {}

// Kernels launched early.
inline void griddepcontrol_wait() { emulator::kernels_before_have_ended(); }
inline void griddepcontrol_launch_dependents() { emulator::next_kernel_may_start(); }

// Barriers.
inline void bar_sync(unsigned id, unsigned threads) { emulator::bar_sync(id, threads); }
inline void mbarrier_init_shared_cta_b64(unsigned barrier, unsigned arrivals) {
  emulator::mbarrier_init(barrier, arrivals);
}
inline void mbarrier_arrive_shared_cta_b64(unsigned barrier, unsigned count) {
  emulator::mbarrier_arrive(barrier, count);
}
inline void mbarrier_arrive_expect_tx_shared_cta_b64(unsigned barrier, unsigned bytes) {
  emulator::mbarrier_expect(barrier, bytes);
  emulator::mbarrier_arrive(barrier, 1);
}
inline void mbarrier_try_wait_parity_shared_cta_b64__selp_b32(unsigned& done, unsigned barrier, unsigned parity,
                                                              int yes, int) {
  emulator::mbarrier_wait(barrier, parity);
  done = yes;
}

// It gives up after one look.
inline void mbarrier_try_wait_parity_shared_cta_b64__selp_b32(unsigned& done, unsigned barrier, unsigned parity,
                                                              unsigned, int yes, int no) {
  done = emulator::mbarrier_ended(barrier, parity) ? yes : no;
}

// Copies by the engine.
inline void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(unsigned to, const void* from,
                                                                           unsigned bytes, unsigned barrier) {
  emulator::bulk_load(to, from, bytes, barrier);
}
inline void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes_L2_cache_hint(unsigned to, const void* from,
                                                                                         unsigned bytes,
                                                                                         unsigned barrier,
                                                                                         Long policy) {
  if (policy != 1 && policy != 2) emulator::fail("a copy with a policy that nobody made");
  cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(to, from, bytes, barrier);
}
inline void createpolicy_fractional_L2_evict_first_b64(Long& policy) { policy = 1; }
inline void createpolicy_fractional_L2_evict_last_b64(Long& policy) { policy = 2; }
inline void cp_async_bulk_global_shared_cta_bulk_group(Long to, unsigned from, unsigned bytes) {
  emulator::bulk_store(reinterpret_cast<void*>(to), from, bytes);
}
inline void cp_async_bulk_commit_group() { emulator::bulk_commit(); }
inline void cp_async_bulk_wait_group_read(unsigned pending) { emulator::bulk_await(pending, true); }
inline void cp_async_bulk_wait_group(unsigned pending) { emulator::bulk_await(pending, false); }

// Numbers.
inline unsigned rounded_to_bf16(float x) {
  const unsigned bits = __float_as_uint(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFF;
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline float of_bf16(unsigned bits) { return __uint_as_float(bits << 16); }
inline void cvt_rn_bf16x2_f32(unsigned& pair, float high, float low) {
  pair = rounded_to_bf16(low) | rounded_to_bf16(high) << 16;
}
inline void mul_rn_bf16x2(unsigned& product, unsigned a, unsigned b) {
  product = rounded_to_bf16(of_bf16(a & 0xFFFF) * of_bf16(b & 0xFFFF)) |
            rounded_to_bf16(of_bf16(a >> 16) * of_bf16(b >> 16)) << 16;
}
inline unsigned to_e4m3(float x) {
  const unsigned sign = __float_as_uint(x) >> 24 & 0x80;
  if (std::isnan(x)) return 0x7F;
  const float magnitude = std::fabs(x);
  if (magnitude >= 448.0f) return sign | 0x7E;
  if (magnitude < 0x1p-6f) return sign | unsigned(std::nearbyint(magnitude * 512.0f));
  const unsigned bits = __float_as_uint(magnitude), rounded = bits + 0x7FFFF + (bits >> 20 & 1);
  return sign | min((rounded >> 20) - (120u << 3), 0x7Eu);
}
inline float of_e4m3(unsigned code) {
  const unsigned exponent = code >> 3 & 0xF, fraction = code & 7;
  const float magnitude = (code & 0x7F) == 0x7F ? NAN
                          : exponent == 0       ? fraction * 0x1p-9f
                                                : __uint_as_float((exponent + 120) << 23 | fraction << 20);
  return code & 0x80 ? -magnitude : magnitude;
}
inline void cvt_rn_satfinite_e4m3x2_f32(unsigned short& pair, float high, float low) {
  pair = to_e4m3(low) | to_e4m3(high) << 8;
}
// Here a half of the pair is its e4m3 byte: only the next instruction looks at it.
inline void cvt_rn_f16x2_e4m3x2(unsigned& halves, unsigned short bytes) {
  halves = (bytes & 0xFF) | (bytes & 0xFF00) << 8;
}
inline void mov_b32__cvt_f32_f16__cvt_f32_f16(float& low, float& high, unsigned halves) {
  low = of_e4m3(halves & 0xFF), high = of_e4m3(halves >> 16 & 0xFF);
}

}  // namespace ptx

#include "tma_instructions.h"
#include "dequant_instructions.h"
