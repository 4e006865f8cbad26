// Rows on their way through shared memory, for inclusion: one warp starts their copies, a place of a ring for each, and
// other warps read them in that order. What is under way does not depend on how many threads there are.

#include "mbarrier.cuh"

// What goes to the readers with a row.
struct Note {
  u64 to;
  float weight;
  u32 marks;
};

// Which of COUNT places is the next, and the parity of its round.
template <int COUNT>
struct Place {
  int index = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance() {
    if (++index == COUNT) index = 0, parity ^= 1;
  }
};

// A ring of COUNT rows of at most MOST_BYTES.
template <int COUNT, int MOST_BYTES>
struct Ring {
  static constexpr int PITCH = (MOST_BYTES + 127) / 128 * 128;
  static constexpr int BYTES = COUNT * PITCH;

  u8* rows;  // BYTES of dynamic shared memory
  Note* notes;
  u32 full, empty;  // barriers of the first place; the next are 8 bytes further
  Place<COUNT> place;

  __device__ __forceinline__ Ring(u8* rows, Note (&notes)[COUNT], const u64 (&barriers)[2 * COUNT])
      : rows(rows), notes(notes), full(shared_address(barriers)), empty(full + 8 * COUNT) {}

  // By one thread, before a barrier of the block. `writers` is 2 where one warp loads rows and another writes their
  // notes.
  __device__ __forceinline__ void init(int readers, int writers = 1) const {
    for (int i = 0; i < COUNT; ++i) {
      barrier_init(full + 8 * i, writers), barrier_init(empty + 8 * i, readers * ARRIVALS_OF_WARP);
    }
    // The copy engine arrives at them.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }

  // The next row: `bytes` from `from`, or a note alone. For the warp that writes.
  __device__ __forceinline__ void push(const void* from, int bytes, const Note& note) {
    const u32 ready = full + 8 * place.index;
    barrier_wait(empty + 8 * place.index, place.parity ^ 1);
    __syncwarp();  // a lane that comes late would take the round after for this one
    if ((threadIdx.x & 31) == 0) {
      notes[place.index] = note;
      barrier_expect(ready, bytes);
      if (bytes > 0) bulk_load(shared_address(rows + place.index * PITCH), from, bytes, ready);
    }
    place.advance();
  }

  // The two halves of `push`, each for a warp of its own. Both go through the same rows in the same order.
  __device__ __forceinline__ void load(const void* from, int bytes) {
    const u32 ready = full + 8 * place.index;
    barrier_wait(empty + 8 * place.index, place.parity ^ 1);
    __syncwarp();
    if ((threadIdx.x & 31) == 0) {
      barrier_expect(ready, bytes);
      if (bytes > 0) bulk_load(shared_address(rows + place.index * PITCH), from, bytes, ready);
    }
    place.advance();
  }
  __device__ __forceinline__ void describe(const Note& note) {
    barrier_wait(empty + 8 * place.index, place.parity ^ 1);
    __syncwarp();
    if ((threadIdx.x & 31) == 0) {
      notes[place.index] = note;
      barrier_arrive(full + 8 * place.index);
    }
    place.advance();
  }

  // The row at hand and its note, once they are there; then `pop`, when a warp has read them. For warps that read.
  __device__ __forceinline__ Note front() const {
    barrier_wait(full + 8 * place.index, place.parity);
    return notes[place.index];
  }
  __device__ __forceinline__ const u8* row() const { return rows + place.index * PITCH; }
  __device__ __forceinline__ void pop() {
    barrier_arrive_warp(empty + 8 * place.index);
    place.advance();
  }
};
