// Instructions of kernels that TMA and the tensor cores work for; see instructions.h.

#pragma once

#include "device.h"
#include "tensor_cores.h"
#include "tensor_maps.h"

namespace ptx {

template <class... Kept>
inline void nothing(Kept&...) {}

// Clusters. A warp tells the other blocks by one instruction, of as many lanes: with lanes that arrive one by one, a
// block could be told of the next phase before it has been of this one.
inline void mov_u32_cluster_ctarank(unsigned& rank) { rank = emulator::rank_in_cluster(); }
inline void mapa_shared_cluster_u32(unsigned& there, unsigned address, unsigned rank) {
  there = emulator::in_block_of_cluster(address, rank);
}
inline void barrier_cluster_arrive_relaxed_aligned() { emulator::cluster_arrive(); }
inline void barrier_cluster_wait_aligned() { emulator::cluster_wait(); }
inline void barrier_cluster_arrive_release_aligned__barrier_cluster_wait_acquire_aligned() {
  emulator::cluster_arrive();
  emulator::cluster_wait();
}
inline void mbarrier_arrive_shared_cluster_b64(unsigned barrier, unsigned count) {
  emulator::mbarrier_arrive_in_cluster(barrier, count);
}

inline void st_async_shared_cluster_mbarrier_complete_tx_bytes_b32(unsigned to, unsigned value, unsigned barrier) {
  emulator::async_store(to, value, barrier);
}

// Barriers of some warps.
inline void bar_arrive(unsigned id, unsigned threads) { emulator::bar_arrive(id, threads); }
inline void setp_ne_b32__bar_red_and_pred__selp_b32(unsigned& all, unsigned value, unsigned id, unsigned zero,
                                                    unsigned threads, unsigned yes, unsigned no) {
  const bool differs = value != zero;
  all = emulator::bar_sync(id, threads, !differs) ? no : yes;
}

// Of no effect here.
inline void fence_mbarrier_init_release_cluster() {}
inline void prefetch_tensormap(const void*) {}
inline void setmaxnreg_dec_sync_aligned_u32(int) { emulator::meet("setmaxnreg.dec", 0); }
inline void setmaxnreg_inc_sync_aligned_u32(int) { emulator::meet("setmaxnreg.inc", 0); }

// One lane of the warp, whichever.
inline void elect_sync__selp_b32(unsigned& is, unsigned mask, unsigned yes, unsigned no) {
  all_lanes(mask);
  emulator::meet("elect.sync", 0);
  is = lane_of_warp() == 31 ? yes : no;
}

// Copies of boxes.
inline void cp_async_bulk_tensor_2d_shared_cluster_global_mbarrier_complete_tx_bytes(unsigned to, const void* map,
                                                                                     unsigned barrier, int c0, int c1) {
  const int at[] = {c0, c1};
  emulator::tensor_load(to, map, barrier, at, 2, 0);
}
inline void cp_async_bulk_tensor_2d_shared_cluster_global_mbarrier_complete_tx_bytes_multicast_cluster(
    unsigned to, const void* map, unsigned barrier, int c0, int c1, unsigned blocks) {
  const int at[] = {c0, c1};
  emulator::tensor_load(to, map, barrier, at, 2, blocks);
}
inline void cp_async_bulk_tensor_4d_shared_cluster_global_mbarrier_complete_tx_bytes(unsigned to, const void* map,
                                                                                     unsigned barrier, int c0, int c1,
                                                                                     int c2, int c3) {
  const int at[] = {c0, c1, c2, c3};
  emulator::tensor_load(to, map, barrier, at, 4, 0);
}
inline void cp_async_bulk_tensor_4d_shared_cluster_global_mbarrier_complete_tx_bytes_multicast_cluster(
    unsigned to, const void* map, unsigned barrier, int c0, int c1, int c2, int c3, unsigned blocks) {
  const int at[] = {c0, c1, c2, c3};
  emulator::tensor_load(to, map, barrier, at, 4, blocks);
}

// Copies by threads.
inline void cp_async_ca_shared_global(unsigned to, const void* from, unsigned bytes) {
  emulator::async_copy(to, from, bytes, bytes);
}
inline void cp_async_cg_shared_global(unsigned to, const void* from, unsigned present, unsigned bytes) {
  emulator::async_copy(to, from, bytes, present);
}
inline void cp_async_commit_group() { emulator::async_commit(); }
inline void cp_async_wait_group(unsigned pending) { emulator::async_await(pending); }
inline void cp_async_mbarrier_arrive_noinc_shared_cta_b64(unsigned barrier) { emulator::async_arrive(barrier); }

// Loads of what nobody writes.
inline void ld_global_nc_L1_no_allocate_v4_u32(unsigned& x, unsigned& y, unsigned& z, unsigned& w, const void* at) {
  const uint4 value = *static_cast<const uint4*>(at);
  x = value.x, y = value.y, z = value.z, w = value.w;
}
inline void cp_async_bulk_prefetch_L2_global(const void* at, unsigned bytes) {
  if (reinterpret_cast<size_t>(at) % 16 != 0 || bytes % 16 != 0 || bytes == 0)
    emulator::fail("%u bytes from %p", bytes, at);
}
inline void ld_global_nc_L1_no_allocate_v2_u32(unsigned& x, unsigned& y, const void* at) {
  const unsigned* words = static_cast<const unsigned*>(at);
  x = words[0], y = words[1];
}

// Shared memory and registers.
inline void prmt_b32(unsigned& bytes, unsigned low, unsigned high, unsigned selector) {
  bytes = __byte_perm(low, high, selector);
}
inline void ld_shared_v2_u32(unsigned& x, unsigned& y, unsigned from) {
  if (from % 8 != 0) emulator::fail("shared address %08x, not a multiple of 8", from);
  const unsigned* words = static_cast<const unsigned*>(emulator::from_shared(from, 8));
  x = words[0], y = words[1];
}
inline void setp_ne_b32__ld_shared_f32(float& to, unsigned from, unsigned now, unsigned zero) {
  if (now != zero) memcpy(&to, emulator::from_shared(from, 4), 4);
}
inline void mov_u32_laneid__shr_u32(unsigned& to, int by) { to = lane_of_warp() >> by; }

// Products: sums, lower words of both descriptors, whether to add; the text has a zero and the upper words.
template <class... Operands>
inline void products(unsigned columns, emulator::Kind kind, Operands&&... operands) {
  static_assert(((sizeof operands == 4) && ...));
  void* const at[] = {(void*)&operands...};
  void* const* const behind = at + columns / 2;
  auto word = [&](int i) { return *static_cast<const unsigned*>(behind[i]); };
  auto descriptor = [&](int i) { return Long(word(4 + i)) << 32 | word(i); };
  emulator::wgmma(reinterpret_cast<float* const*>(at), columns, kind, descriptor(0), descriptor(1), word(2) != word(3));
}
#define PRODUCTS(NAME, COLUMNS, KIND)                                                          \
  template <class... Operands>                                                                 \
  inline void setp_ne_b32__mov_b64__mov_b64__wgmma_mma_async_sync_aligned_m64n##COLUMNS##NAME( \
      Operands&&... operands) {                                                                \
    products(COLUMNS, emulator::Kind::KIND, operands...);                                      \
  }
#define PRODUCTS_OF_BOTH(COLUMNS)            \
  PRODUCTS(k32_f32_e4m3_e4m3, COLUMNS, E4M3) \
  PRODUCTS(k16_f32_bf16_bf16, COLUMNS, BF16)
PRODUCTS_OF_BOTH(8)
PRODUCTS_OF_BOTH(16)
PRODUCTS_OF_BOTH(32)
PRODUCTS_OF_BOTH(128)
PRODUCTS(k16_f32_bf16_bf16, 256, BF16)
inline void wgmma_fence_sync_aligned() { emulator::wgmma_fence(); }
inline void wgmma_commit_group_sync_aligned() { emulator::wgmma_commit(); }
inline void wgmma_wait_group_sync_aligned(unsigned pending) { emulator::wgmma_wait(pending); }

// Numbers.
inline void cvt_rn_f16x2_f32(unsigned& pair, float high, float low) {
  pair = bits_as<unsigned short>(_Float16(low)) | bits_as<unsigned short>(_Float16(high)) << 16;
}
inline void rcp_approx_f32(float& inverse, float x) { inverse = 1.0f / x; }

}  // namespace ptx
