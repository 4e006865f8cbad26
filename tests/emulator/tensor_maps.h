// Copies of boxes of tensors, by tensor maps that tensor_maps.py makes.

#pragma once

#include "scheduler.h"

namespace emulator {

// Of up to four dimensions, the first of which is contiguous.
struct TensorMap {
  Long address, element_bytes, dimensions, swizzled;
  Long sizes[4], strides[3], box[4];  // strides in bytes
  Long unused;
};
static_assert(sizeof(TensorMap) == 128);

// In the 128-byte swizzle 16-byte chunks of a row change places: the lower three bits of their number are added to
// those of the row's, without carry. It goes by addresses of shared memory.
inline Word swizzled_128(Word address) { return address ^ (address >> 7 & 7) << 4; }

// The box at `coordinates` into each block of the cluster that has its bit in `blocks`, or, of 0, into that of `to`;
// each counts the whole box at its own barrier.
void tensor_load(Word to, const void* map, Word barrier, const int* coordinates, Word dimensions, Word blocks);

}  // namespace emulator
