// Instructions of the kernels that decode weights in registers; see instructions.h.

#pragma once

#include "device.h"
#include "tensor_cores.h"

namespace ptx {

// Barriers in shared memory, named without the block that they are of.
inline void mbarrier_init_shared_b64(unsigned barrier, unsigned arrivals) {
  emulator::mbarrier_init(barrier, arrivals);
}
inline void mbarrier_arrive_shared_b64(unsigned barrier) { emulator::mbarrier_arrive(barrier, 1); }
inline void mbarrier_arrive_expect_tx_shared_b64(unsigned barrier, unsigned bytes) {
  mbarrier_arrive_expect_tx_shared_cta_b64(barrier, bytes);
}
inline void mbarrier_try_wait_parity_shared_b64__bra(unsigned barrier, unsigned parity) {
  emulator::mbarrier_wait(barrier, parity);
}

// Shared memory.
template <class T>
inline T in_shared(unsigned address) {
  if (address % sizeof(T) != 0) emulator::fail("shared address %08x, not a multiple of %zu", address, sizeof(T));
  return *static_cast<const T*>(emulator::from_shared(address, sizeof(T)));
}
inline void ld_shared_v4_u32(unsigned& x, unsigned& y, unsigned& z, unsigned& w, unsigned address) {
  const uint4 value = in_shared<uint4>(address);
  x = value.x, y = value.y, z = value.z, w = value.w;
}
inline void st_shared_v4_u32(unsigned address, unsigned x, unsigned y, unsigned z, unsigned w) {
  if (address % 16 != 0) emulator::fail("shared address %08x, not a multiple of 16", address);
  *static_cast<uint4*>(emulator::from_shared(address, 16)) = {x, y, z, w};
}
inline void ld_shared_u32(unsigned& value, unsigned address) { value = in_shared<unsigned>(address); }
inline void ld_shared_u16(unsigned short& value, unsigned address) { value = in_shared<unsigned short>(address); }
// Lanes 8 j .. 8 j + 7 bring where the rows of matrix j lie; a lane has two numbers of one row of each.
inline void stmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned row, unsigned word0, unsigned word1, unsigned word2,
                                                     unsigned word3) {
  if (row % 16 != 0) emulator::fail("a row of a matrix at shared address %08x", row);
  const unsigned words[] = {word0, word1, word2, word3}, lane = lane_of_warp();
  const Long* rows = meet("stmatrix", row);
  for (unsigned j = 0; j < 4; ++j) {
    const unsigned to = brought<unsigned>(rows, 8 * j + lane / 4) + lane % 4 * 4;
    *static_cast<unsigned*>(emulator::from_shared(to, sizeof words[j])) = words[j];
  }
}
inline void mov_b32(unsigned short& low, unsigned short& high, unsigned pair) {
  low = pair & 0xFFFF, high = pair >> 16;
}
inline void mov_b32(unsigned& pair, unsigned short half) { pair = half | unsigned(half) << 16; }
// Bit by bit, by a table of eight results; a is the highest bit of what is looked up.
inline void lop3_b32(unsigned& result, unsigned a, unsigned b, unsigned c, unsigned table) {
  result = 0;
  for (unsigned row = 0; row < 8; ++row) {
    if (table >> row & 1) result |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
  }
}
inline void max_NaN_f32(float& larger, float a, float b) { larger = std::isnan(a) || std::isnan(b) ? NAN : max(a, b); }
inline void ex2_approx_ftz_f32(float& power, float x) { power = std::exp2(x) < 0x1p-126f ? 0.0f : std::exp2(x); }
inline void rcp_approx_ftz_f32(float& inverse, float x) { inverse = 1.0f / x < 0x1p-126f ? 0.0f : 1.0f / x; }
inline void cp_async_wait_all() {
  emulator::async_commit();
  emulator::async_await(0);
}

// A product of one warp, d[16, 8] += a[16, 16] * b[16, 8], rounded once and summed in the order of `wgmma`.
inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& d0, float& d1, float& d2, float& d3, unsigned a0,
                                                                unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                                                unsigned b1) {
  const unsigned own[] = {a0, a1, a2, a3, b0, b1}, lane = lane_of_warp();
  unsigned words[6][32];
  for (unsigned i = 0; i < 6; ++i) {
    const Long* all = meet("mma", own[i]);
    for (unsigned of = 0; of < 32; ++of) words[i][of] = brought<unsigned>(all, of);
  }
  auto number = [](unsigned word, unsigned k) { return double(of_bf16(k % 2 ? word >> 16 : word & 0xFFFF)); };
  float* d[] = {&d0, &d1, &d2, &d3};
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = lane / 4, half = i / 2, column = lane % 4 * 2 + i % 2;
    double sum = *d[i];
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned of = k % 8 / 2, pair = k / 8;
      sum += number(words[half + 2 * pair][row * 4 + of], k) * number(words[4 + pair][column * 4 + of], k);
    }
    *d[i] = sum;
  }
}

// Operands of a product, one after the other: sums, the four elements of an array, a descriptor, whether to add, the
// signs of both operands, whether b lies the other way.
struct OfProduct {
  float* sums[128];
  const unsigned* a = nullptr;
  unsigned num_sums = 0, num_a = 0, num_flags = 0;
  Long b = 0;
  int flags[4];

  void take(float& sum) { sums[num_sums++] = &sum; }
  void take(const unsigned& word) {
    if (num_a == 0) a = &word;
    if (&word != a + num_a++) emulator::fail("operand a of a product is not the elements of an array in their order");
  }
  void take(const Long& descriptor) { b = descriptor; }
  void take(const int& flag) { flags[num_flags++] = flag; }
};

template <unsigned COLUMNS, class... Operands>
inline void product_of_registers(Operands&... operands) {
  static_assert(sizeof...(Operands) == COLUMNS / 2 + 4 + 1 + 4);
  OfProduct all;
  (all.take(operands), ...);
  if (all.flags[1] != 1 || all.flags[2] != 1 || all.flags[3] != 0)
    emulator::fail("signs or an order that is not emulated");
  emulator::wgmma(all.sums, COLUMNS, emulator::Kind::BF16, 0, all.b, all.flags[0], all.a);
}

#define PRODUCT_OF_REGISTERS(COLUMNS)                                                                 \
  template <class... Operands>                                                                        \
  inline void wgmma_mma_async_sync_aligned_m64n##COLUMNS##k16_f32_bf16_bf16(Operands&&... operands) { \
    product_of_registers<COLUMNS>(operands...);                                                       \
  }
PRODUCT_OF_REGISTERS(8)
PRODUCT_OF_REGISTERS(16)
PRODUCT_OF_REGISTERS(24)
PRODUCT_OF_REGISTERS(32)
PRODUCT_OF_REGISTERS(40)
PRODUCT_OF_REGISTERS(48)
PRODUCT_OF_REGISTERS(64)
PRODUCT_OF_REGISTERS(80)
PRODUCT_OF_REGISTERS(96)
PRODUCT_OF_REGISTERS(112)
PRODUCT_OF_REGISTERS(128)
PRODUCT_OF_REGISTERS(144)
PRODUCT_OF_REGISTERS(160)

}  // namespace ptx
