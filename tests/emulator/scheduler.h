// What emulated kernels share: threads of the CPU that take turns, blocks, and what is under way beside them.
//
// A simulation is run by one thread of the CPU. Each thread of a block is a fiber that runs until it has to wait for
// others or looks at memory that other ranks write; which one is next is drawn at random, from a seed. Copies by the
// copy engine are done at random times, at the latest when they are waited for, so that what is read too early, or
// written over too early, is found. A simulation in which nothing can go on ends with a report of who waits for what.

#pragma once

#include <cstdint>
#include <cstddef>
#include <memory>
#include <vector>

typedef unsigned int Word;
typedef unsigned long long Long;

struct Index3 {
  Word x, y, z;
};

namespace emulator {

// What a kernel sees of the thread that it is.
struct Thread {
  Index3 index, block, block_size, grid;
};
extern Thread* thread;  // the one that runs

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// All 32 lanes of the warp come together, each with a value; what they brought, valid until the next meeting but one.
const Long* meet(const char* what, Long value);
// `threads` of the block come together at barrier `id`, some without waiting; whether any waiting one brought a flag.
bool bar_sync(Word id, Word threads, bool flag = false);
void bar_arrive(Word id, Word threads);
// Others may go on before this thread does: it is about to read, or write, what others look at.
void look(const char* what, bool writes = false);
// What other parts of the emulator keep of the block, by name; ends with it.
std::shared_ptr<void>& kept(const char* name);
// Threads that wait until another wakes them all.
using Waiting = std::vector<Thread*>;
void wait_in(Waiting& waiting, const char* what, Word detail = 0);
void wake(Waiting& waiting);
// Where the stack of this thread ends.
const unsigned char* stack_end();
// Nanoseconds, which fly where all that goes on is looking.
long long clock_ns();

// Shared memory: a variable of a source, and what the launch asked for.
void* shared_variable(const char* name, size_t bytes, size_t alignment);
void* dynamic_shared();
Word to_shared(const void* at);
void* from_shared(Word address, size_t bytes);  // of any block of the cluster
Word in_block_of_cluster(Word address, Word rank);
Word rank_in_cluster();
// All threads of all blocks of the cluster come together.
void cluster_arrive();
void cluster_wait();

void mbarrier_init(Word barrier, Word arrivals);
void mbarrier_arrive(Word barrier, Word count);
// One instruction of as many lanes as the cluster has blocks: all of them arrive at once.
void mbarrier_arrive_in_cluster(Word barrier, Word count);
void mbarrier_expect(Word barrier, Word bytes);  // without an arrival
void mbarrier_wait(Word barrier, Word parity);
bool mbarrier_ended(Word barrier, Word parity);  // that phase; others go on meanwhile

// Copies by the copy engine. `load` counts its bytes at a barrier; `store` is of this thread's open group, whose older
// ones, all but `pending`, are waited for: until they have read, or until they have written.
void bulk_load(Word to, const void* from, Word bytes, Word barrier);
void bulk_store(void* to, Word from, Word bytes);
void bulk_commit();
void bulk_await(Word pending, bool read_only);

// A copy of many places, from memory, or of zeros from null; counts `bytes` at a barrier of the block that they are in.
struct Piece {
  const void* from;
  Word to, bytes;
};
void load_pieces(const Piece* pieces, Word count, Word bytes, Word barrier);

// A value that a thread stores in a block of the cluster, which comes late and counts its bytes at a barrier of that
// block.
void async_store(Word to, Word value, Word barrier);

// Copies that a thread begins and goes on: the first `present` bytes of `bytes`, then zeros. An arrival comes after all
// those before it.
void async_copy(Word to, const void* from, Word bytes, Word present);
void async_arrive(Word barrier);
void async_commit();
void async_await(Word pending);

// Of programmatic launches.
void kernels_before_have_ended();
void next_kernel_may_start();

}  // namespace emulator
