// Harness of test_dequant_walk.py: tells the tiles that each block of a grid walks. OVERLAPPED: blocks take what is next.
//
// In: how far off a fast quotient is (units in its last place), blocks, units of weight rows, groups, then the offsets and
// the experts of the groups. Out: block, group, local, rows, unit, high of each tile.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <strings.h>
#include <iostream>
#include <set>
#include <vector>

#define __device__
#define __forceinline__ inline
using std::max, std::min;
constexpr int MAX_GROUPS = 256, TILE_UNITS = 4, TILE_TOKENS = 64, WARP = 1;
struct {
  unsigned x;
} threadIdx, blockIdx, gridDim;
int off_by;
typedef unsigned u32;

// Of the only lane.
int __ffs(u32 word) { return ffs(static_cast<int>(word)); }
u32 __ballot_sync(u32, bool one) { return one; }
int __reduce_add_sync(u32, int one) { return one; }
template <class T>
T __shfl_sync(u32, T one, int) {
  return one;
}
int __shfl_up_sync(u32, int, int) { std::abort(); }

u32 atomicAdd(u32* at, u32 by) { return (*at += by) - by; }

int ceil_div(int a, int b) { return (a + b - 1) / b; }

float __fdividef(float a, float b) {
  float q = a / b;
  for (int i = 0; i < std::abs(off_by); ++i) q = std::nextafter(q, off_by < 0 ? 0.0f : INFINITY);
  return q;
}

WALK

int main() {
  int unit_rows, num_groups;
  std::cin >> off_by >> gridDim.x >> unit_rows >> num_groups;
  Groups groups;
  for (int g = 0; g <= num_groups; ++g) std::cin >> groups.offsets[g];
  for (int g = 0; g < num_groups; ++g) std::cin >> groups.experts[g];
  std::vector<Walk> walks;
  std::vector<Tile> tiles(gridDim.x);
  std::set<std::pair<int, unsigned>> free;  // units that blocks have multiplied, and their numbers
  u32 taken = 0;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    walks.emplace_back(groups, num_groups, unit_rows, &taken);
    free.insert({0, blockIdx.x});
  }
  while (!free.empty()) {
    // The one that is done first.
    const auto [units, block] = *free.begin();
    free.erase(free.begin());
    blockIdx.x = block;
    Tile& tile = tiles[block];
    tile = walks[block].next(tile);
    if (tile.rows == 0) continue;
    free.insert({units + tile.high, block});
    std::cout << block << ' ' << tile.group << ' ' << tile.local << ' ' << tile.rows << ' ' << tile.unit << ' ' << tile.high << '\n';
  }
}
