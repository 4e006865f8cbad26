// Rows that pass through shared memory on their way from one place in memory to others, moved by the copy engine, and
// the flags that say that they have landed; for inclusion. Each warp has rows of its own.
//
// Macros: those of signalling.cuh, RECORD_BYTES (of what is stored), WARPS (of a block, that copy), STAGES (records
// that a warp has in shared memory), TOGETHER (flags that are stored at a time).

#include "signalling.cuh"

constexpr int PITCH = (RECORD_BYTES + 127) / 128 * 128;
constexpr int BEHIND = 2;  // records of a warp that may be on their way when flags of those before are stored

static_assert(RECORD_BYTES % 16 == 0, "RECORD_BYTES: the copy engine stores 16 bytes at a time");
static_assert(TOGETHER >= 1, "TOGETHER: at least one flag is stored at a time");
static_assert(STAGES >= 2, "STAGES: one record is loaded while another is stored");

// The stages of a warp, used in turn: a load into one is awaited by its barrier.
struct Stages {
  u8* memory;
  u32 barriers;
  int next = 0, current = 0;  // number of the load that is started, and awaited, next

  __device__ __forceinline__ u8* at(int number) const { return memory + number % STAGES * PITCH; }

  // By lane 0, which has stored what the stage held before, with as many groups of copies since as it has other
  // stages but one.
  __device__ __forceinline__ void load(const void* from, int bytes) {
    if ((threadIdx.x & 31) == 0) {
      bulk_await_read<STAGES - 2>();
      const u32 barrier = barriers + 8 * (next % STAGES);
      barrier_expect(barrier, bytes);
      bulk_load(shared_address(at(next)), from, bytes, barrier);
    }
    ++next;
    __syncwarp();
  }

  // Waits for the oldest load that has not been awaited, and returns where it is.
  __device__ __forceinline__ u8* await_load() {
    barrier_wait(barriers + 8 * (current % STAGES), current / STAGES & 1);
    __syncwarp();
    return at(current++);
  }
};

// For a whole block.
__device__ __forceinline__ void init_barriers(const u64* barriers) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < WARPS * STAGES; ++i) barrier_init(shared_address(barriers + i), 1);
    bulk_fence();  // the copy engine arrives at them
  }
  __syncthreads();
}

// Flags of the records that a warp stores, each on the rank that the record goes to, once it has landed there. A lane
// stands for that rank. TOGETHER flags share a fence, which takes about as long as a record.
struct Flags {
  static constexpr int MOST = BEHIND + TOGETHER;

  int* of_lane;  // of the first slot there
  int value;
  int waiting[MOST];  // slots of the last records, -1 for none
  int count = 0;      // of these

  __device__ __forceinline__ Flags(int* of_lane, int value) : of_lane(of_lane), value(value) {
#pragma unroll
    for (int i = 0; i < MOST; ++i) waiting[i] = -1;
  }

  // Ends the group of copies of a record, which goes to `slot` of the lane's rank, or to none there if that is -1. When
  // enough records are behind it, stores the flags of the first of them.
  __device__ __forceinline__ void store_behind(int slot) {
    if ((threadIdx.x & 31) == 0) bulk_commit();
#pragma unroll
    for (int i = 0; i < MOST; ++i)
      if (i == count) waiting[i] = slot;
    if (++count < MOST) return;
    if ((threadIdx.x & 31) == 0) bulk_await<BEHIND>();
    store<TOGETHER>();
#pragma unroll
    for (int i = 0; i < BEHIND; ++i) waiting[i] = waiting[i + TOGETHER];
    count = BEHIND;
  }

  __device__ __forceinline__ void store_all() {
    if ((threadIdx.x & 31) == 0) bulk_await();
#pragma unroll
    for (int i = 0; i < MOST; ++i)
      if (i >= count) waiting[i] = -1;
    store<MOST>();
  }

  // The flags of the first FIRST records, which lane 0 has seen landed.
  template <int FIRST>
  __device__ __forceinline__ void store() const {
    __syncwarp();
    fence_system();
#pragma unroll
    for (int i = 0; i < FIRST; ++i)
      if (waiting[i] >= 0) store_relaxed(of_lane + waiting[i], value);
  }
};

// The last block to come here ends the epoch on this rank, and says so on all. For a whole block.
__device__ __forceinline__ void end_epoch(int* epoch_ptr, int epoch, int* counter, int* flag_of_lane) {
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x;
  bool last = false;
  if (lane == 0) last = last_to_arrive(counter);
  last = __any_sync(ALL, last);
  __syncwarp();
  if (!last) return;
  if (lane == 0) *epoch_ptr = epoch;
  if (lane < WORLD) store_release(flag_of_lane, epoch);
}
