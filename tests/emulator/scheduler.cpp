// See scheduler.h.

#include "scheduler.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#if !defined(__x86_64__)
#error "the switch between fibers is written for x86-64"
#endif

extern "C" void emulator_switch(void** keep, void* to);
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, .-emulator_switch
)");

// A launch, as Python hands it over.
struct Launch {
  void (*entry)(void**);
  void** arguments;
  const char* name;
  Word grid[3], threads, shared_bytes, cluster, stream, early, at_once;
};

namespace emulator {

Thread* thread = nullptr;

namespace {

constexpr size_t STACK_BYTES = 128 * 1024, MOST_KEPT_STACKS = 8192;
constexpr Word FIRST_ADDRESS = 1024;  // no address of shared memory is 0
constexpr size_t MOST_SHARED = 227 * 1024, MEMORY_BYTES = FIRST_ADDRESS + MOST_SHARED;
constexpr Word RANK_SHIFT = 24;  // from there on, 1 + the rank in the cluster, or 0 for the block itself
constexpr int POISON = 0xCD;
constexpr int IDLE_STEPS = 20000;  // looks in a row after which time flies
constexpr Word SLOW = 256;         // steps of others to one of a slow warp
constexpr long long MOST_STEPS = 50000000;

struct Block;
struct Kernel;

struct Copy;
using Group = std::vector<std::shared_ptr<Copy>>;

struct Part {
  const unsigned char* from;  // null for zeros
  unsigned char* to;
  Word bytes;
};

struct Copy {
  Block* block;
  std::vector<Part> parts;
  Word barrier = 0, counted = 0, arrivals = 0;  // 0 for stores; what it tells the barrier when it has written
  Group before{};                               // done first
  bool has_read = false, has_written = false;
  std::vector<unsigned char> content{};
};

struct Fiber {
  Thread seen;  // first: `thread` points to it
  Block* block;
  Word number;
  void* stack_pointer;
  void* stack;
  const char* waits;  // for what, or null
  Word detail;
  Group open;
  std::vector<Group> groups;
  Group async_open, async_before;  // of the open group; since the last arrival
  std::vector<Group> async_groups;
  Word cluster_turn;
  bool slow;
};

struct Meeting {
  const char* what;
  Word here;
  Long brought[2][32];
  int turn;
  Waiting waiting;
  std::vector<std::array<Word, 3>> arrivals;  // lane, barrier and count of the instruction that some have come to
};

struct Barrier {
  Word here, expected;
  bool flag, result[2];
  int turn;
  Waiting waiting;
};

// An mbarrier, in the 64 bits that it has.
struct Mbarrier {
  Word bytes;  // still to come; may be passed by for a while
  unsigned pending : 15, arrivals : 15, parity : 1, made : 1;
};
static_assert(sizeof(Mbarrier) == 8);

struct Cluster {
  std::vector<Block*> blocks;
  Word here = 0, turn = 0;  // threads at its barrier
  Waiting waiting{};
};

// Few values by names, which are looked for all the time: most often by the very literal.
template <class Value>
struct ByName {
  std::deque<std::pair<const char*, Value>> all{};  // references stay valid

  Value* find(const char* name) {
    for (auto& [key, value] : all)
      if (key == name || strcmp(key, name) == 0) return &value;
    return nullptr;
  }
  Value& add(const char* name, Value value) { return all.emplace_back(name, std::move(value)).second; }
};

struct Block {
  Kernel* kernel;
  Index3 index;
  std::shared_ptr<Cluster> cluster;
  Word rank;  // in the cluster
  unsigned char* memory;
  Word used;  // of it
  ByName<Word> variables;
  ByName<std::shared_ptr<void>> kept;
  std::vector<Fiber> fibers;  // they stay where they are
  std::vector<Meeting> warps;
  Barrier barriers[16];
  std::vector<std::pair<Word, Fiber*>> at_mbarriers;
  Word running, copies;
  bool triggered;
};

struct Kernel {
  Launch launch;
  Kernel* before;  // in its stream
  Word next, ended, triggered, blocks;
  bool done;
  Waiting after;  // for its end
};

// SplitMix64: it draws several times for each step, of which std::mt19937_64 took 6% of a run.
struct Random {
  using result_type = uint64_t;
  uint64_t state = 0;

  static constexpr result_type min() { return 0; }
  static constexpr result_type max() { return ~result_type(0); }
  result_type operator()() {
    uint64_t mixed = state += 0x9E3779B97F4A7C15;
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9;
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB;
    return mixed ^ mixed >> 31;
  }
};

struct Simulation {
  Random random;
  std::vector<std::unique_ptr<Kernel>> kernels;
  std::vector<Word> resident;  // blocks of each stream
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<Fiber*> ready, slow, looking;  // those that look may have to do so many times
  std::vector<std::shared_ptr<Copy>> copies;
  void* stack_pointer = nullptr;
  std::string failure;
  long long now = 0, idle = 0, steps = 0;
  Word most_resident = 1, eager = 50, in_turn = 50;  // percent: copies done at once; the one woken last goes on
  Word slow_blocks = 0, slow_warps = 0;              // percent

  Word draw(Word below) { return (random() >> 32) * below >> 32; }
};

Simulation* simulation = nullptr;

// Of blocks that have ended, for those that begin, in later runs too: new memory would cost as much as most kernels.
struct Kept {
  std::vector<void*> stacks;
  std::vector<unsigned char*> memories;
} kept_memory;

void keep_memory(Block* block) {
  for (auto& fiber : block->fibers) kept_memory.stacks.push_back(fiber.stack);
  kept_memory.memories.push_back(block->memory);
}

Fiber* self() { return reinterpret_cast<Fiber*>(thread); }

void leave() {
  Fiber* fiber = self();
  emulator_switch(&fiber->stack_pointer, simulation->stack_pointer);
  thread = &fiber->seen;
}

void wait(const char* what, Word detail) {
  self()->waits = what, self()->detail = detail;
  leave();
}

void go_on(Fiber* fiber) {
  fiber->waits = nullptr;
  (fiber->slow ? simulation->slow : simulation->ready).push_back(fiber);
}

Block* block_of(Word address) {
  Block* own = self()->block;
  const Word rank = address >> RANK_SHIFT;
  if (rank == 0) return own;
  if (rank > own->cluster->blocks.size()) fail("shared address %08x is of no block of the cluster", address);
  Block* block = own->cluster->blocks[rank - 1];
  if (block == nullptr) fail("shared address %08x is of a block that has ended", address);
  return block;
}

unsigned char* in_memory(Block* block, Word address, size_t bytes) {
  const Word offset = address & ((1u << RANK_SHIFT) - 1);
  if (offset < FIRST_ADDRESS || offset + bytes > block->used)
    fail("shared address %08x, %zu bytes, is outside of what the block has", address, bytes);
  return block->memory + offset;
}

Mbarrier& mbarrier(Block* block, Word address) {
  if (address % 8 != 0) fail("mbarrier at %08x, not a multiple of 8", address);
  return *reinterpret_cast<Mbarrier*>(in_memory(block, address, 8));
}

Mbarrier& made_mbarrier(Block* block, Word address) {
  Mbarrier& barrier = mbarrier(block, address);
  if (!barrier.made || barrier.bytes == 0xCDCDCDCD) fail("mbarrier at %08x is used before it is initialized", address);
  return barrier;
}

void end_phase_if_complete(Block* block, Word address) {
  Mbarrier& barrier = mbarrier(block, address);
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.arrivals, barrier.parity ^= 1;
  simulation->idle = 0;
  Waiting woken;
  auto& all = block->at_mbarriers;
  const Word offset = address & ((1u << RANK_SHIFT) - 1);
  for (size_t i = 0; i < all.size();) {
    if (all[i].first == offset) woken.push_back(&all[i].second->seen), all[i] = all.back(), all.pop_back();
    else ++i;
  }
  wake(woken);
}

void arrive(Block* block, Word address, Word count) {
  Mbarrier& barrier = made_mbarrier(block, address);
  if (barrier.pending < count) fail("%u arrive at mbarrier %08x, which waits for %u", count, address, barrier.pending);
  barrier.pending -= count;
  end_phase_if_complete(block, address);
}

void read(Copy& copy) {
  if (copy.has_read) return;
  for (const Part& part : copy.parts) {
    copy.content.resize(copy.content.size() + part.bytes);
    if (part.from != nullptr) memcpy(copy.content.data() + copy.content.size() - part.bytes, part.from, part.bytes);
  }
  copy.has_read = true;
  simulation->idle = 0;
}

void write(Copy& copy) {
  if (copy.has_written) return;
  for (auto& other : copy.before) write(*other);
  copy.before.clear();
  read(copy);
  const unsigned char* content = copy.content.data();
  for (const Part& part : copy.parts) memcpy(part.to, content, part.bytes), content += part.bytes;
  copy.has_written = true;
  --copy.block->copies;
  if (copy.barrier != 0) {
    made_mbarrier(copy.block, copy.barrier).bytes -= copy.counted;
    arrive(copy.block, copy.barrier, copy.arrivals);
  }
}

void check_aligned(const void* from, const void* to, Word bytes, Word unit) {
  if ((reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) | bytes) % unit != 0)
    fail("a copy from %p to %p, %u bytes, is not of whole %u bytes", from, to, bytes, unit);
}

std::shared_ptr<Copy> add_copy(Block* block, std::vector<Part> parts, Word barrier = 0, Word counted = 0,
                               Word arrivals = 0) {
  ++block->copies;
  simulation->copies.push_back(std::make_shared<Copy>(Copy{block, std::move(parts), barrier, counted, arrivals}));
  return simulation->copies.back();
}

// All groups but `pending`, until they have read, or until they have written.
void finish(std::vector<Group>& groups, Word pending, bool read_only) {
  for (size_t i = 0; i + pending < groups.size(); ++i)
    for (auto& copy : groups[i]) read_only ? read(*copy) : write(*copy);
  auto& all = simulation->copies;
  all.erase(std::remove_if(all.begin(), all.end(), [](auto& copy) { return copy->has_written; }), all.end());
  auto written = [](Group& group) {
    return std::all_of(group.begin(), group.end(), [](auto& copy) { return copy->has_written; });
  };
  groups.erase(groups.begin(), std::find_if_not(groups.begin(), groups.end(), written));
}

void trigger(Block* block) {
  if (block->triggered) return;
  block->triggered = true;
  ++block->kernel->triggered;
}

void end_block(Block* block) {
  if (block->copies != 0)
    fail("block %u of %s ended while copies were under way", block->index.x, block->kernel->launch.name);
  const unsigned char *unused = block->memory + block->used, *end = block->memory + MEMORY_BYTES;
  if (unused != end && (*unused != POISON || memcmp(unused, unused + 1, end - unused - 1) != 0))
    fail("block %u of %s stored outside of its shared memory", block->index.x, block->kernel->launch.name);
  trigger(block);
  Kernel* kernel = block->kernel;
  ++kernel->ended;
  --simulation->resident[kernel->launch.stream];
  block->cluster->blocks[block->rank] = nullptr;
  if (kernel->ended == kernel->blocks) {
    kernel->done = true;
    simulation->idle = 0;
    wake(kernel->after);
  }
  auto& all = simulation->blocks;
  keep_memory(block);
  all.erase(std::find_if(all.begin(), all.end(), [&](auto& other) { return other.get() == block; }));
}

void run_fiber() {
  Fiber* fiber = self();
  fiber->block->kernel->launch.entry(fiber->block->kernel->launch.arguments);
  fiber->waits = "nothing: it has ended";
  --fiber->block->running;
  leave();
  __builtin_unreachable();
}

void* new_stack() {
  if (auto& kept = kept_memory.stacks; !kept.empty()) {
    void* stack = kept.back();
    kept.pop_back();
    return stack;
  }
  void* stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack == MAP_FAILED) fail("no memory for another thread");
  return stack;
}

unsigned char* new_memory() {
  auto& kept = kept_memory.memories;
  if (kept.empty()) return static_cast<unsigned char*>(aligned_alloc(1024, MEMORY_BYTES));
  unsigned char* memory = kept.back();
  kept.pop_back();
  return memory;
}

bool may_start(const Kernel* kernel) {
  if (kernel->next == kernel->blocks) return false;
  const Kernel* before = kernel->before;
  if (kernel->launch.early) {
    if (before != nullptr && before->triggered != before->blocks) return false;
  } else {
    for (; before != nullptr; before = before->before)
      if (!before->done) return false;
  }
  const Word resident = simulation->resident[kernel->launch.stream];
  const bool fits = resident + kernel->launch.cluster <= simulation->most_resident;
  return resident == 0 || fits || (kernel->launch.at_once && kernel->next > 0);
}

void start_cluster(Kernel* kernel) {
  const Launch& launch = kernel->launch;
  auto cluster = std::make_shared<Cluster>();
  for (Word rank = 0; rank < launch.cluster; ++rank) {
    auto block = std::make_unique<Block>();
    const Word number = kernel->next++;
    block->kernel = kernel, block->cluster = cluster, block->rank = rank;
    block->index = {number % launch.grid[0], number / launch.grid[0] % launch.grid[1],
                    number / launch.grid[0] / launch.grid[1]};
    block->memory = new_memory();
    memset(block->memory, POISON, MEMORY_BYTES);
    block->used = FIRST_ADDRESS + launch.shared_bytes;
    block->running = launch.threads;
    block->warps.resize((launch.threads + 31) / 32);
    const bool slow_block = simulation->draw(100) < simulation->slow_blocks;
    bool slow = false;
    block->fibers = std::vector<Fiber>(launch.threads);
    for (Word i = 0; i < launch.threads; ++i) {
      Fiber* fiber = &block->fibers[i];
      fiber->seen = {{i, 0, 0}, block->index, {launch.threads, 1, 1}, {launch.grid[0], launch.grid[1], launch.grid[2]}};
      fiber->block = block.get(), fiber->number = i;
      fiber->stack = new_stack();
      void** top = reinterpret_cast<void**>(static_cast<char*>(fiber->stack) + STACK_BYTES);
      *--top = nullptr;
      *--top = reinterpret_cast<void*>(run_fiber);
      for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
      fiber->stack_pointer = top;
      if (i % 32 == 0) slow = slow_block || simulation->draw(100) < simulation->slow_warps;
      fiber->slow = slow;
      go_on(fiber);
    }
    cluster->blocks.push_back(block.get());
    ++simulation->resident[launch.stream];
    simulation->blocks.push_back(std::move(block));
  }
  simulation->idle = 0;
}

// One thing that can go on; whether there was any.
bool step() {
  Simulation& s = *simulation;
  std::vector<Kernel*> startable;
  const bool none_ready = s.ready.empty() && s.slow.empty();
  if (s.steps++ % 64 == 0 || none_ready)
    for (auto& kernel : s.kernels)
      if (may_start(kernel.get())) startable.push_back(kernel.get());
  if (!startable.empty()) {
    start_cluster(startable[s.draw(startable.size())]);
    return true;
  }
  // Those that only look may wait for a copy.
  const Word chance = none_ready ? (s.looking.empty() ? 100 : std::max(s.eager, 5u)) : s.eager;
  if (!s.copies.empty() && s.draw(100) < chance) {
    const size_t chosen = s.draw(s.copies.size());
    std::shared_ptr<Copy> copy = s.copies[chosen];
    if (!copy->has_read && s.draw(2)) read(*copy);
    else write(*copy);
    if (copy->has_written) s.copies[chosen] = s.copies.back(), s.copies.pop_back();
    return true;
  }
  if (none_ready && s.looking.empty()) return false;
  const bool looks = none_ready || (!s.looking.empty() && s.draw(8) == 0);
  const bool slow = s.ready.empty() || (!s.slow.empty() && s.draw(SLOW) == 0);
  auto& chosen = looks ? s.looking : slow ? s.slow : s.ready;
  if (looks || s.draw(100) >= s.in_turn) std::swap(chosen[s.draw(chosen.size())], chosen.back());
  Fiber* fiber = chosen.back();
  chosen.pop_back();
  thread = &fiber->seen;
  emulator_switch(&s.stack_pointer, fiber->stack_pointer);
  thread = nullptr;
  if (fiber->block->running == 0 && s.failure.empty()) end_block(fiber->block);
  return true;
}

std::string who_waits() {
  std::map<std::tuple<Word, std::string, Word, Word, std::string, Word>, Word> lanes;
  for (auto& block : simulation->blocks)
    for (auto& fiber : block->fibers)
      ++lanes[{block->kernel->launch.stream, block->kernel->launch.name, block->index.x, fiber.number / 32,
               fiber.waits ? fiber.waits : "its turn", fiber.detail}];
  std::string text;
  for (auto& [who, count] : lanes) {
    char line[256];
    const auto& [stream, kernel, block, warp, what, detail] = who;
    snprintf(line, sizeof line, "\nstream %u: %s block %u warp %u: %u lanes wait for %s (%x)", stream, kernel.c_str(),
             block, warp, count, what.c_str(), detail);
    text += line;
  }
  return text;
}

}  // namespace

void fail(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (thread == nullptr) throw std::runtime_error(text);
  Fiber* fiber = self();
  const Block* block = fiber->block;
  simulation->failure = std::string(block->kernel->launch.name) + " block " + std::to_string(block->index.x) +
                        " thread " + std::to_string(fiber->number) + ": " + text;
  leave();
  __builtin_unreachable();
}

const Long* meet(const char* what, Long value) {
  Fiber* fiber = self();
  Meeting& meeting = fiber->block->warps[fiber->number / 32];
  if (meeting.here == 0) meeting.what = what;
  else if (meeting.what != what && strcmp(meeting.what, what) != 0)
    fail("the warp parts: %s here, %s there", what, meeting.what);
  const int turn = meeting.turn;
  meeting.brought[turn][fiber->number % 32] = value;
  if (++meeting.here == 32) {
    meeting.here = 0, meeting.turn ^= 1;
    wake(meeting.waiting);
  } else {
    wait_in(meeting.waiting, what);
  }
  return meeting.brought[turn];
}

namespace {

bool at_barrier(Word id, Word threads, bool flag, bool waits) {
  Fiber* fiber = self();
  if (id >= 16 || threads % 32 != 0 || threads == 0) fail("barrier %u of %u threads", id, threads);
  Barrier& barrier = fiber->block->barriers[id];
  if (barrier.here == 0) barrier.expected = threads, barrier.flag = false;
  else if (barrier.expected != threads)
    fail("barrier %u of %u threads here, of %u there", id, threads, barrier.expected);
  barrier.flag |= flag;
  const int turn = barrier.turn;
  if (++barrier.here == threads) {
    barrier.here = 0, barrier.turn ^= 1;
    barrier.result[turn] = barrier.flag;
    simulation->idle = 0;
    wake(barrier.waiting);
  } else if (waits) {
    wait_in(barrier.waiting, "a barrier of the block", id);
  }
  return barrier.result[turn];
}

}  // namespace

bool bar_sync(Word id, Word threads, bool flag) { return at_barrier(id, threads, flag, true); }
void bar_arrive(Word id, Word threads) { at_barrier(id, threads, false, false); }

void look(const char* what, bool writes) {
  Simulation& s = *simulation;
  if (writes) s.idle = 0;
  s.now += ++s.idle > IDLE_STEPS ? 100000 : 10;
  Fiber* fiber = self();
  fiber->waits = what;
  s.looking.push_back(fiber);
  leave();
  fiber->waits = nullptr;
}

std::shared_ptr<void>& kept(const char* name) {
  auto& all = self()->block->kept;
  std::shared_ptr<void>* found = all.find(name);
  return found != nullptr ? *found : all.add(name, nullptr);
}

void wait_in(Waiting& waiting, const char* what, Word detail) {
  waiting.push_back(thread);
  wait(what, detail);
}

void wake(Waiting& waiting) {
  std::shuffle(waiting.begin(), waiting.end(), simulation->random);
  for (Thread* one : waiting) go_on(reinterpret_cast<Fiber*>(one));
  waiting.clear();
}

const unsigned char* stack_end() { return static_cast<unsigned char*>(self()->stack) + STACK_BYTES; }

long long clock_ns() { return simulation->now; }

void* shared_variable(const char* name, size_t bytes, size_t alignment) {
  Block* block = self()->block;
  if (const Word* found = block->variables.find(name)) return block->memory + *found;
  const Word at = (block->used + alignment - 1) / alignment * alignment;
  block->used = at + bytes;
  if (block->used > MEMORY_BYTES) fail("%s does not fit into shared memory", name);
  return block->memory + block->variables.add(name, at);
}

void* dynamic_shared() { return self()->block->memory + FIRST_ADDRESS; }

Word to_shared(const void* at) {
  Block* block = self()->block;
  const auto offset = static_cast<const unsigned char*>(at) - block->memory;
  if (offset < FIRST_ADDRESS || offset > static_cast<long>(block->used)) fail("%p is not in shared memory", at);
  return offset;
}

void* from_shared(Word address, size_t bytes) { return in_memory(block_of(address), address, bytes); }

Word in_block_of_cluster(Word address, Word rank) {
  return (address & ((1u << RANK_SHIFT) - 1)) | (rank + 1) << RANK_SHIFT;
}

Word rank_in_cluster() { return self()->block->rank; }

void cluster_arrive() {
  Fiber* fiber = self();
  Cluster& cluster = *fiber->block->cluster;
  fiber->cluster_turn = cluster.turn;
  if (++cluster.here < fiber->block->kernel->launch.threads * cluster.blocks.size()) return;
  cluster.here = 0, ++cluster.turn;
  simulation->idle = 0;
  wake(cluster.waiting);
}

void cluster_wait() {
  Fiber* fiber = self();
  Cluster& cluster = *fiber->block->cluster;
  if (cluster.turn != fiber->cluster_turn) return;
  wait_in(cluster.waiting, "the barrier of the cluster");
}

void mbarrier_init(Word address, Word arrivals) { mbarrier(self()->block, address) = {0, arrivals, arrivals, 0, 1}; }

void mbarrier_arrive(Word address, Word count) { arrive(block_of(address), address, count); }

void mbarrier_arrive_in_cluster(Word address, Word count) {
  const Fiber* fiber = self();
  const Cluster& cluster = *fiber->block->cluster;
  auto& arrivals = fiber->block->warps[fiber->number / 32].arrivals;
  for (auto& other : arrivals)
    if (other[0] == fiber->number % 32) fail("lane %u arrives again before the other blocks are told", other[0]);
  arrivals.push_back({fiber->number % 32, address, count});
  if (arrivals.size() < cluster.blocks.size()) return;
  std::shuffle(arrivals.begin(), arrivals.end(), simulation->random);
  for (auto& arrival : arrivals) mbarrier_arrive(arrival[1], arrival[2]);
  arrivals.clear();
}

void mbarrier_expect(Word address, Word bytes) { made_mbarrier(block_of(address), address).bytes += bytes; }

void mbarrier_wait(Word address, Word parity) {
  Fiber* fiber = self();
  Block* block = block_of(address);
  // One that comes late may miss a phase, and wait for the next but one.
  while (made_mbarrier(block, address).parity == parity) {
    block->at_mbarriers.emplace_back(address & ((1u << RANK_SHIFT) - 1), fiber);
    wait("an mbarrier", address);
  }
}

bool mbarrier_ended(Word address, Word parity) {
  Block* block = block_of(address);
  look("an mbarrier, for a while");
  return made_mbarrier(block, address).parity != parity;
}

void bulk_load(Word to, const void* from, Word bytes, Word barrier) {
  check_aligned(from, from_shared(to, bytes), bytes, 16);
  const Piece piece = {from, to, bytes};
  load_pieces(&piece, 1, bytes, barrier);
}

void load_pieces(const Piece* pieces, Word count, Word bytes, Word barrier) {
  Block* block = block_of(barrier);
  made_mbarrier(block, barrier);
  std::vector<Part> parts(count);
  for (Word i = 0; i < count; ++i) {
    const Piece& piece = pieces[i];
    if (block_of(piece.to) != block) fail("a copy to %08x counts at %08x, in another block", piece.to, barrier);
    parts[i] = {static_cast<const unsigned char*>(piece.from), in_memory(block, piece.to, piece.bytes), piece.bytes};
    memset(parts[i].to, POISON, piece.bytes);
  }
  add_copy(block, std::move(parts), barrier, bytes);
}

void bulk_store(void* to, Word from, Word bytes) {
  Block* block = self()->block;
  const unsigned char* source = in_memory(block, from, bytes);
  check_aligned(source, to, bytes, 16);
  self()->open.push_back(add_copy(block, {{source, static_cast<unsigned char*>(to), bytes}}));
}

void bulk_commit() {
  self()->groups.push_back(std::move(self()->open));
  self()->open.clear();
}

void bulk_await(Word pending, bool read_only) { finish(self()->groups, pending, read_only); }

void async_store(Word to, Word value, Word barrier) {
  Block* block = block_of(barrier);
  made_mbarrier(block, barrier);
  if (block_of(to) != block) fail("a store to %08x counts at %08x, in another block", to, barrier);
  unsigned char* place = in_memory(block, to, 4);
  check_aligned(nullptr, place, 8, 4);
  auto copy = add_copy(block, {{nullptr, place, 4}}, barrier, 4);
  copy->content.resize(4);
  memcpy(copy->content.data(), &value, 4);
  copy->has_read = true;
}

void async_copy(Word to, const void* from, Word bytes, Word present) {
  Block* block = self()->block;
  unsigned char* place = in_memory(block, to, bytes);
  check_aligned(from, place, bytes, bytes);
  if (present > bytes) fail("a copy of %u bytes to %u", present, bytes);
  memset(place, POISON, bytes);
  auto* source = static_cast<const unsigned char*>(from);
  auto copy = add_copy(block, {{source, place, present}, {nullptr, place + present, bytes - present}});
  if (simulation->draw(2)) simulation->copies.pop_back();  // nothing else but the wait for it sees to it
  self()->async_open.push_back(copy);
  self()->async_before.push_back(std::move(copy));
}

void async_arrive(Word barrier) {
  Block* block = block_of(barrier);
  add_copy(block, {}, barrier, 0, 1)->before = std::move(self()->async_before);
  self()->async_before.clear();
}

void async_commit() {
  self()->async_groups.push_back(std::move(self()->async_open));
  self()->async_open.clear();
}

void async_await(Word pending) {
  finish(self()->async_groups, pending, false);
  auto& before = self()->async_before;
  before.erase(std::remove_if(before.begin(), before.end(), [](auto& copy) { return copy->has_written; }),
               before.end());
}

void kernels_before_have_ended() {
  Kernel* before = self()->block->kernel->before;
  if (before == nullptr || before->done) return;
  wait_in(before->after, "the end of the kernel before");
}

void next_kernel_may_start() { trigger(self()->block); }

}  // namespace emulator

// Runs all launches; 0, or 1 with a message. Those of a stream come one after the other.
extern "C" int emulator_run(const Launch* launches, int count, Long seed, char* message, size_t message_bytes) {
  using namespace emulator;
  Simulation own;
  simulation = &own;
  own.random.state = seed;
  own.most_resident = 1 + own.draw(6);
  own.eager = own.draw(3) * 45;
  own.in_turn = own.draw(3) * 45;
  own.slow_blocks = own.draw(3) * 25;
  own.slow_warps = own.draw(2) * 25;
  Word streams = 0;
  for (int i = 0; i < count; ++i) {
    auto kernel = std::make_unique<Kernel>();
    kernel->launch = launches[i];
    kernel->blocks = launches[i].grid[0] * launches[i].grid[1] * launches[i].grid[2];
    kernel->done = kernel->blocks == 0;
    for (auto& earlier : own.kernels)
      if (earlier->launch.stream == launches[i].stream) kernel->before = earlier.get();
    streams = std::max(streams, launches[i].stream + 1);
    own.kernels.push_back(std::move(kernel));
  }
  own.resident.resize(streams);
  try {
    while (own.failure.empty() && own.steps < MOST_STEPS && step()) {
    }
  } catch (const std::runtime_error& error) {
    own.failure = error.what();
  }
  const bool done = std::all_of(own.kernels.begin(), own.kernels.end(), [](auto& kernel) { return kernel->done; });
  if (own.failure.empty() && !done)
    own.failure = own.steps < MOST_STEPS ? "nothing can go on" : "no end after " + std::to_string(own.steps) + " steps";
  if (!own.failure.empty()) own.failure += who_waits();
  snprintf(message, message_bytes, "%s", own.failure.c_str());
  for (auto& block : own.blocks) keep_memory(block.get());
  for (auto& kept = kept_memory.stacks; kept.size() > MOST_KEPT_STACKS; kept.pop_back())
    munmap(kept.back(), STACK_BYTES);
  simulation = nullptr;
  return own.failure.empty() ? 0 : 1;
}
