// See tensor_cores.h.

#include "tensor_cores.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <vector>

#include "instructions.h"
#include "tensor_maps.h"

namespace emulator {

namespace {

constexpr Word ROWS = 16, STEP_BYTES = 32;

// Sums that products are under way to; the registers that they come back to, of each lane.
struct Sums {
  Word columns, under_way;
  std::vector<float*> registers[32];
  std::vector<float> values;  // [columns, ROWS]
};

Word bytes_of(Kind kind) { return kind == Kind::E4M3 ? 1 : 2; }

struct Product {
  std::shared_ptr<Sums> sums;
  Kind kind;
  Long a, b;
  bool add;
  const Word* a_registers[32];            // null where a lies in shared memory
  std::vector<unsigned char> operands{};  // as they were at the issue
  bool done = false;
};

// What the tensor cores know of a warp.
struct Warp {
  Word number, passed;  // lanes that are through with an instruction
  bool fenced;
  float* const* registers[32];
  const Word* a_registers[32];
  std::vector<unsigned char> at_fence[32];  // the stack of each lane at its last fence
  std::map<float*, std::shared_ptr<Sums>> under_way;
  std::vector<std::shared_ptr<Product>> issued;
  size_t finished;            // of these
  std::deque<size_t> groups;  // where those end that are not finished
};

struct Warpgroup {
  Warp warps[4];
  Waiting waiting;  // for products that not all warps have issued
};

Warpgroup& own_warpgroup() {
  auto& all = kept("warpgroups at the tensor cores");
  if (all == nullptr) all = std::make_shared<std::map<Word, Warpgroup>>();
  return (*static_cast<std::map<Word, Warpgroup>*>(all.get()))[threadIdx.x / 128];
}

Warp& own_warp() {
  const Word number = threadIdx.x / 32 % 4;
  Warp& warp = own_warpgroup().warps[number];
  warp.number = number;
  return warp;
}

// Where a lane belongs in the sums: its register i.
Word place(Word lane, Word i) { return (i / 4 * 8 + lane % 4 * 2 + i % 2) * ROWS + lane / 4 + i / 2 % 2 * 8; }

// One step of K of `rows` rows of an operand from row `first` on: K-major, in the 128-byte swizzle or in none.
void copy_operand(unsigned char* to, Long descriptor, Word first, Word rows) {
  const Word swizzle = descriptor >> 62;
  if (swizzle > 1 || (descriptor >> 49 & 7) != 0)
    fail("descriptor %016llx: only the 128-byte swizzle and none are emulated", descriptor);
  const Word start = (descriptor & 0x3FFF) << 4, groups_apart = (descriptor >> 32 & 0x3FFF) << 4;
  const Word chunks_apart = (descriptor >> 16 & 0x3FFF) << 4;  // without swizzle
  for (Word row = first; row < first + rows; ++row)
    for (Word k = 0; k < STEP_BYTES; k += 16, to += 16) {
      const Word group = start + row / 8 * groups_apart;
      const Word plain = group + k / 16 * chunks_apart + row % 8 * 16;
      const Word address = swizzle ? swizzled_128(group + row % 8 * 128 + k) : plain;
      memcpy(to, from_shared(address, 16), 16);
    }
}

// Operand a from the registers of a warp: [ROWS, STEP_BYTES].
void copy_registers(unsigned char* to, const Word* const* registers) {
  for (Word lane = 0; lane < 32; ++lane)
    for (Word i = 0; i < 4; ++i)
      memcpy(to + (lane / 4 + i % 2 * 8) * STEP_BYTES + i / 2 * 16 + lane % 4 * 4, registers[lane] + i, 4);
}

std::vector<unsigned char> operands_of(const Warp& warp, const Product& product) {
  std::vector<unsigned char> bytes((ROWS + product.sums->columns) * STEP_BYTES);
  if (product.a_registers[0] != nullptr) copy_registers(bytes.data(), product.a_registers);
  else copy_operand(bytes.data(), product.a, warp.number * ROWS, ROWS);
  copy_operand(bytes.data() + ROWS * STEP_BYTES, product.b, 0, product.sums->columns);
  return bytes;
}

// values[n][r] += the sum over k of a[k][r] * b[n][k], rounded once. 8 rows of 4 columns are in registers at a time.
__attribute__((optimize("O3"), target_clones("avx512f", "avx2", "default"))) void multiply(float* values,
                                                                                           const double* a,
                                                                                           const double* b, Word steps,
                                                                                           Word columns) {
  typedef double Eight __attribute__((vector_size(64), aligned(8)));
  for (Word first = 0; first < columns; first += 4)
    for (Word row = 0; row < ROWS; row += 8) {
      Eight sums[4];
      for (Word n = 0; n < 4; ++n)
        for (Word r = 0; r < 8; ++r) sums[n][r] = values[(first + n) * ROWS + row + r];
      for (Word k = 0; k < steps; ++k) {
        const Eight of_a = *reinterpret_cast<const Eight*>(a + k * ROWS + row);
        for (Word n = 0; n < 4; ++n) sums[n] += of_a * b[(first + n) * steps + k];
      }
      for (Word n = 0; n < 4; ++n)
        for (Word r = 0; r < 8; ++r) values[(first + n) * ROWS + row + r] = sums[n][r];
    }
}

// Numbers of an operand in their order.
std::vector<double> decode(Kind kind, const unsigned char* at, size_t bytes) {
  static const std::vector<double> e4m3 = [] {
    std::vector<double> all(256);
    for (Word code = 0; code < 256; ++code) all[code] = ptx::of_e4m3(code);
    return all;
  }();
  const Word size = bytes_of(kind);
  std::vector<double> numbers(bytes / size);
  for (double& number : numbers) {
    number = size == 1 ? e4m3[*at] : ptx::of_bf16(at[0] | at[1] << 8);
    at += size;
  }
  return numbers;
}

// Operand b of a product, [columns, steps of K]. The other warps of a warpgroup ask for it right after the first.
const std::vector<double>& decoded_b(const Product& product) {
  static std::vector<unsigned char> last;
  static Kind kind;
  static std::vector<double> numbers;
  const auto from = product.operands.begin() + ROWS * STEP_BYTES, end = product.operands.end();
  if (kind != product.kind || !std::equal(from, end, last.begin(), last.end())) {
    kind = product.kind;
    last.assign(from, end);
    numbers = decode(kind, last.data(), last.size());
  }
  return numbers;
}

void finish(const Warp& warp, Product& product) {
  if (product.done) return;
  product.done = true;
  if (operands_of(warp, product) != product.operands)
    fail("operands %016llx and %016llx changed while their product was under way", product.a, product.b);
  Sums& sums = *product.sums;
  const Word steps = STEP_BYTES / bytes_of(product.kind);
  const std::vector<double> by_rows = decode(product.kind, product.operands.data(), ROWS * STEP_BYTES);
  double a[STEP_BYTES * ROWS];  // [k, row]
  for (Word k = 0; k < steps; ++k)
    for (Word row = 0; row < ROWS; ++row) a[k * ROWS + row] = by_rows[row * steps + k];
  if (!product.add) std::fill(sums.values.begin(), sums.values.end(), 0.0f);
  multiply(sums.values.data(), a, decoded_b(product).data(), steps, sums.columns);
}

// The registers of operand a are what they were at the issue.
void must_be_unchanged(const Product& product) {
  if (product.a_registers[0] == nullptr) return;
  unsigned char now[ROWS * STEP_BYTES];
  copy_registers(now, product.a_registers);
  if (memcmp(now, product.operands.data(), sizeof now) != 0)
    fail("registers of operand a were written before their product was waited for");
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
    for (Word lane = 0; lane < 32; ++lane) {
      sums->registers[lane].reserve(columns / 2);
      for (Word i = 0; i < columns / 2; ++i) {
        float* at = warp.registers[lane][i];
        sums->registers[lane].push_back(at);
        sums->values[place(lane, i)] = *at;
        *at = NAN;
      }
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
      for (Word i = 0; i < sums.columns / 2; ++i) {
        if (!std::isnan(*sums.registers[lane][i])) fail("sums were written while products were under way");
        *sums.registers[lane][i] = sums.values[place(lane, i)];
      }
    entry = warp.under_way.erase(entry);
    warp.fenced = false;
  }
}

// The registers of operand a are what they were at the last fence: they lie in the stack.
void must_be_fenced(const Warp& warp, const Word* a_registers) {
  const auto& then = warp.at_fence[threadIdx.x % 32];
  const size_t from_end = stack_end() - reinterpret_cast<const unsigned char*>(a_registers);
  if (from_end > then.size() || memcmp(&*then.end() - from_end, a_registers, 16) != 0)
    fail("registers of operand a were written after the last fence");
}

}  // namespace

void wgmma(float* const* sums, Word columns, Kind kind, Long a, Long b, bool add, const Word* a_registers) {
  Warpgroup& group = own_warpgroup();
  Warp& warp = own_warp();
  if (a_registers != nullptr) must_be_fenced(warp, a_registers);
  warp.registers[threadIdx.x % 32] = sums;
  warp.a_registers[threadIdx.x % 32] = a_registers;
  const Long* brought = meet("wgmma.mma_async", a * 2 + b * 3 + add);
  by_first_lane(warp, [&] {
    for (Word lane = 1; lane < 32; ++lane)
      if (brought[lane] != brought[0]) fail("lanes 0 and %u have different descriptors", lane);
    auto product = std::make_shared<Product>(Product{begin(warp, columns), kind, a, b, add});
    std::copy(warp.a_registers, warp.a_registers + 32, product->a_registers);
    if (product->sums->columns != columns) fail("products of %u and %u columns", columns, product->sums->columns);
    product->operands = operands_of(warp, *product);
    // The four warps of a warpgroup issue the same.
    const size_t number = warp.issued.size();
    warp.issued.push_back(product);
    for (const Warp& other : group.warps) {
      if (other.issued.size() <= number) continue;
      const Product& same = *other.issued[number];
      if (same.a != a || same.b != b || same.add != add || same.sums->columns != columns)
        fail("product %zu of warp %u is not that of warp %u", number, warp.number, other.number);
    }
    wake(group.waiting);
  });
}

void wgmma_fence() {
  Warp& warp = own_warp();
  meet("wgmma.fence", 0);
  warp.at_fence[threadIdx.x % 32].assign(static_cast<const unsigned char*>(__builtin_frame_address(0)), stack_end());
  by_first_lane(warp, [&] { warp.fenced = true; });
}

void wgmma_commit() {
  Warp& warp = own_warp();
  meet("wgmma.commit_group", 0);
  by_first_lane(warp, [&] { warp.groups.push_back(warp.issued.size()); });
}

void wgmma_wait(Word pending) {
  Warp& warp = own_warp();
  Warpgroup& group = own_warpgroup();
  meet("wgmma.wait_group", 0);
  look("its turn", true);  // whoever is about to write what products read has the chance to
  const auto& groups = warp.groups;
  const size_t end = groups.size() > pending ? groups[groups.size() - pending - 1] : warp.finished;
  auto behind = [&](const Warp& other) { return other.issued.size() < end; };
  while (std::any_of(group.warps, group.warps + 4, behind)) wait_in(group.waiting, "products of the other warps");
  by_first_lane(warp, [&] {
    for (; warp.finished < end; ++warp.finished) {
      for (const Warp& one : group.warps) finish(one, *one.issued[warp.finished]);
      Product& product = *warp.issued[warp.finished];
      must_be_unchanged(product);  // for another warp this may have been done long ago
      product.operands = {};
      --product.sums->under_way;
    }
    while (warp.groups.size() > pending) warp.groups.pop_front();
    give_back(warp);
  });
}

}  // namespace emulator
