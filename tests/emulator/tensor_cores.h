// Products of warpgroups whose operands both come from shared memory (`wgmma`).
//
// A GPU reads the operands at any time until the products are waited for, and writes the sums at any time: here
// operands must not change from the issue on, and registers of sums hold a NaN until the wait that gives them back.

#pragma once

#include "scheduler.h"

namespace emulator {

enum class Kind { E4M3, BF16 };  // of operands

// Each lane's part in sums (+)= a[64, 32 bytes of K] * b[columns, 32 bytes of K]^T: `columns / 2` registers, and
// descriptors of both operands.
void wgmma(float* const* sums, Word columns, Kind kind, Long a, Long b, bool add);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(Word pending);

}  // namespace emulator
