// Products of warpgroups whose operand b comes from shared memory, and a from there or from registers (`wgmma`).
//
// A GPU reads the operands at any time until the products are waited for, and writes the sums at any time: here
// operands must not change from the issue on, and registers of sums hold a NaN until the wait that gives them back. A
// product is one of all four warps: none gets past its wait before all have issued it, and it is done for all of them
// then.

#pragma once

#include "scheduler.h"

namespace emulator {

enum class Kind { E4M3, BF16 };  // of operands

// Each lane's part in sums (+)= a[64, 32 bytes of K] * b[columns, 32 bytes of K]^T: `columns / 2` registers, and
// descriptors of both operands, or four registers of a, which must not have been written since the last fence.
void wgmma(float* const* sums, Word columns, Kind kind, Long a, Long b, bool add, const Word* a_registers = nullptr);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(Word pending);

}  // namespace emulator
