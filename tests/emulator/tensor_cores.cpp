// See tensor_cores.h.

#include "tensor_cores.h"

#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <tuple>
#include <vector>

#include "instructions.h"
#include "tensor_maps.h"

namespace emulator {

namespace {

constexpr Word ROWS = 16, STEP_BYTES = 32, MOST_COLUMNS = 256;

// Sums that products are under way to; the registers that they come back to, of each lane.
struct Sums {
  Word columns, under_way;
  std::vector<float*> registers[32];
  std::vector<float> values;  // [ROWS, columns]
};

Word bytes_of(Kind kind) { return kind == Kind::E4M3 ? 1 : 2; }

struct Product {
  std::shared_ptr<Sums> sums;
  Kind kind;
  Long a, b;
  bool add;
  std::vector<unsigned char> operands;  // as they were at the issue
};
using Products = std::vector<Product>;

// What the tensor cores know of a warp.
struct Warp {
  Word number, passed;  // lanes that are through with an instruction
  bool fenced;
  float* const* registers[32];
  std::map<float*, std::shared_ptr<Sums>> under_way;
  Products open;
  std::deque<Products> groups;
  std::vector<std::tuple<Long, Long, bool>> issued;
};

Warp& own_warp() {
  auto& all = kept("warps at the tensor cores");
  if (all == nullptr) all = std::make_shared<std::map<Word, Warp>>();
  const Word number = threadIdx.x / 32;
  Warp& warp = (*static_cast<std::map<Word, Warp>*>(all.get()))[number];
  warp.number = number;
  return warp;
}

// Where a lane belongs in the sums: its register i.
Word place(Word lane, Word i, Word columns) {
  return (lane / 4 + i / 2 % 2 * 8) * columns + i / 4 * 8 + lane % 4 * 2 + i % 2;
}

// One step of K of `rows` rows of an operand from row `first` on: K-major, in the 128-byte swizzle.
void append_operand(std::vector<unsigned char>& bytes, Long descriptor, Word first, Word rows) {
  if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0)
    fail("descriptor %016llx: only the 128-byte swizzle is emulated", descriptor);
  const Word start = (descriptor & 0x3FFF) << 4, groups_apart = (descriptor >> 32 & 0x3FFF) << 4;
  for (Word row = first; row < first + rows; ++row)
    for (Word k = 0; k < STEP_BYTES; k += 16) {
      const Word address = swizzled_128(start + row / 8 * groups_apart + row % 8 * 128 + k);
      const auto* chunk = static_cast<const unsigned char*>(from_shared(address, 16));
      bytes.insert(bytes.end(), chunk, chunk + 16);
    }
}

std::vector<unsigned char> operands_of(const Warp& warp, const Product& product) {
  std::vector<unsigned char> bytes;
  bytes.reserve((ROWS + MOST_COLUMNS) * STEP_BYTES);
  append_operand(bytes, product.a, warp.number % 4 * ROWS, ROWS);
  append_operand(bytes, product.b, 0, product.sums->columns);
  return bytes;
}

// values[r][n] += the sum over k of a[k][r] * b[k][n], rounded once.
__attribute__((optimize("O3"), target_clones("avx2", "default"))) void multiply(float* values, const double* a,
                                                                                const double* b, Word steps,
                                                                                Word columns) {
  double sums[MOST_COLUMNS];
  for (Word row = 0; row < ROWS; ++row) {
    for (Word n = 0; n < columns; ++n) sums[n] = values[row * columns + n];
    for (Word k = 0; k < steps; ++k)
      for (Word n = 0; n < columns; ++n) sums[n] += a[k * ROWS + row] * b[k * columns + n];
    for (Word n = 0; n < columns; ++n) values[row * columns + n] = sums[n];
  }
}

// Numbers of `rows` rows of operands from `first` on, [k, row].
std::vector<double> decode(const Product& product, Word first, Word rows) {
  static const std::vector<double> e4m3 = [] {
    std::vector<double> all(256);
    for (Word code = 0; code < 256; ++code) all[code] = ptx::of_e4m3(code);
    return all;
  }();
  const Word size = bytes_of(product.kind), steps = STEP_BYTES / size;
  std::vector<double> numbers(steps * rows);
  const unsigned char* at = product.operands.data() + first * STEP_BYTES;
  for (Word row = 0; row < rows; ++row)
    for (Word k = 0; k < steps; ++k, at += size)
      numbers[k * rows + row] = size == 1 ? e4m3[*at] : ptx::of_bf16(at[0] | at[1] << 8);
  return numbers;
}

void finish(const Warp& warp, Product& product) {
  if (operands_of(warp, product) != product.operands)
    fail("operands %016llx and %016llx changed while their product was under way", product.a, product.b);
  Sums& sums = *product.sums;
  const std::vector<double> a = decode(product, 0, ROWS), b = decode(product, ROWS, sums.columns);
  if (!product.add) std::fill(sums.values.begin(), sums.values.end(), 0.0f);
  multiply(sums.values.data(), a.data(), b.data(), STEP_BYTES / bytes_of(product.kind), sums.columns);
  --sums.under_way;
}

// The first lane that goes on does the work of the warp.
template <class Work>
void by_first_lane(Warp& warp, Work work) {
  if (warp.passed == 0) work();
  warp.passed = (warp.passed + 1) % 32;
}

// The sums of products that begin: those under way in these registers, or what the registers hold.
std::shared_ptr<Sums> begin(Warp& warp, Word columns) {
  std::shared_ptr<Sums>& sums = warp.under_way[warp.registers[0][0]];
  if (sums == nullptr) {
    if (!warp.fenced) fail("a product without a fence since its registers were free");
    sums = std::make_shared<Sums>();
    sums->columns = columns;
    sums->values.resize(ROWS * columns);
    for (Word lane = 0; lane < 32; ++lane)
      for (Word i = 0; i < columns / 2; ++i) {
        float* at = warp.registers[lane][i];
        sums->registers[lane].push_back(at);
        sums->values[place(lane, i, columns)] = *at;
        *at = NAN;
      }
  }
  ++sums->under_way;
  return sums;
}

void give_back(Warp& warp) {
  for (auto entry = warp.under_way.begin(); entry != warp.under_way.end();) {
    Sums& sums = *entry->second;
    if (sums.under_way > 0) {
      ++entry;
      continue;
    }
    for (Word lane = 0; lane < 32; ++lane)
      for (Word i = 0; i < sums.columns / 2; ++i) *sums.registers[lane][i] = sums.values[place(lane, i, sums.columns)];
    entry = warp.under_way.erase(entry);
    warp.fenced = false;
  }
}

}  // namespace

void wgmma(float* const* sums, Word columns, Kind kind, Long a, Long b, bool add) {
  Warp& warp = own_warp();
  warp.registers[threadIdx.x % 32] = sums;
  const Long* brought = meet("wgmma.mma_async", a * 2 + b * 3 + add);
  by_first_lane(warp, [&] {
    for (Word lane = 1; lane < 32; ++lane)
      if (brought[lane] != brought[0]) fail("lanes 0 and %u have different descriptors", lane);
    Product product = {begin(warp, columns), kind, a, b, add};
    if (product.sums->columns != columns) fail("products of %u and %u columns", columns, product.sums->columns);
    product.operands = operands_of(warp, product);
    warp.open.push_back(std::move(product));
    // The four warps of a warpgroup issue the same.
    warp.issued.emplace_back(a, b, add);
    auto& all = *static_cast<std::map<Word, Warp>*>(kept("warps at the tensor cores").get());
    for (Word other = warp.number / 4 * 4; other < warp.number / 4 * 4 + 4; ++other) {
      const auto& issued = all[other].issued;
      const size_t last = warp.issued.size() - 1;
      if (issued.size() > last && issued[last] != warp.issued[last])
        fail("product %zu of warp %u is not that of warp %u", last, warp.number, other);
    }
  });
}

void wgmma_fence() {
  Warp& warp = own_warp();
  meet("wgmma.fence", 0);
  by_first_lane(warp, [&] { warp.fenced = true; });
}

void wgmma_commit() {
  Warp& warp = own_warp();
  meet("wgmma.commit_group", 0);
  by_first_lane(warp, [&] {
    warp.groups.push_back(std::move(warp.open));
    warp.open.clear();
  });
}

void wgmma_wait(Word pending) {
  Warp& warp = own_warp();
  meet("wgmma.wait_group", 0);
  by_first_lane(warp, [&] {
    for (; warp.groups.size() > pending; warp.groups.pop_front())
      for (Product& product : warp.groups.front()) finish(warp, product);
    give_back(warp);
  });
}

}  // namespace emulator
