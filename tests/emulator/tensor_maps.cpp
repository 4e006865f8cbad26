// See tensor_maps.h.

#include "tensor_maps.h"

#include <algorithm>
#include <vector>

namespace emulator {

namespace {

constexpr Word CHUNK = 16;

// The pieces of one copy: of each row of the box chunks that exist, and zeros for what lies outside of the tensor.
std::vector<Piece> pieces_of(const TensorMap& map, Word to, const int* coordinates) {
  std::vector<Piece> pieces;
  const Word row_bytes = map.box[0] * map.element_bytes;
  const Long first_byte = Long(coordinates[0]) * map.element_bytes, all_bytes = map.sizes[0] * map.element_bytes;
  Word rows = 1;
  for (Word d = 1; d < map.dimensions; ++d) rows *= map.box[d];
  for (Word row = 0; row < rows; ++row) {
    Long offset = first_byte;
    bool inside = first_byte < all_bytes;
    for (Word d = 1, rest = row; d < map.dimensions; rest /= map.box[d], ++d) {
      const long long at = coordinates[d] + static_cast<long long>(rest % map.box[d]);
      inside &= at >= 0 && at < static_cast<long long>(map.sizes[d]);
      offset += at * map.strides[d - 1];
    }
    const auto* from = reinterpret_cast<const unsigned char*>(map.address + offset);
    for (Word chunk = 0; chunk < row_bytes; chunk += CHUNK) {
      const Word flat = to + row * row_bytes + chunk, place = map.swizzled ? swizzled_128(flat) : flat;
      const Word present = inside ? std::min<Long>(CHUNK, all_bytes - std::min(all_bytes, first_byte + chunk)) : 0;
      if (present > 0) pieces.push_back({from + chunk, place, present});
      if (present < CHUNK) pieces.push_back({nullptr, place + present, CHUNK - present});
    }
  }
  return pieces;
}

}  // namespace

void tensor_load(Word to, const void* map_address, Word barrier, const int* coordinates, Word dimensions, Word blocks) {
  const TensorMap& map = *static_cast<const TensorMap*>(map_address);
  if (map.dimensions != dimensions) fail("a map of %llu dimensions, a copy of %u", map.dimensions, dimensions);
  if (to % 128 != 0) fail("a box to %08x, not a multiple of 128", to);
  if (coordinates[0] < 0) fail("a box from column %d: not emulated", coordinates[0]);
  Word bytes = map.element_bytes;
  for (Word d = 0; d < dimensions; ++d) bytes *= map.box[d];
  const Word ranks = blocks == 0 ? 1 : 32;
  for (Word rank = 0; rank < ranks; ++rank) {
    if (blocks != 0 && !(blocks >> rank & 1)) continue;
    const Word there = blocks == 0 ? to : in_block_of_cluster(to, rank);
    const std::vector<Piece> pieces = pieces_of(map, there, coordinates);
    load_pieces(pieces.data(), pieces.size(), bytes, blocks == 0 ? barrier : in_block_of_cluster(barrier, rank));
  }
}

}  // namespace emulator
