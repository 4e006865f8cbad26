// Arrival (dispatch_recv, permute): groups the records that landed here by expert, in an order that depends on nothing else.
//
// Slots of the landing region are worked on in chunks of CHUNK. For each expert a chunk has a bitmap of the slots that go to
// it, so that the place of a row is a count of bits.
//
//   recv_count   counts the rows of each chunk by expert. Launched only where there are several chunks.
//   recv_permute   makes the bitmaps of its chunk, finds the place of each row, and copies row scales, and, as the layer asks
//                  for, block scales and quants. A warp takes a slot. Where slots are few, several warps of different blocks
//                  share the rows of one: an SM stores each word of a swizzled row into a sector of its own.
//   recv_scales  copies swizzled scales where there are several chunks, in the order of the swizzle.
//
// How tokens are awaited:
// - PER_TOKEN_FLAGS (one chunk): each lane awaits its own slot, by the token flag or, from senders that store token flags
//   before the records have landed, by the flag of the source.
// - otherwise: `recv_count` awaits the flag of each source, and so does `recv_permute`, which makes its bitmaps meanwhile.
// This rank's own tokens come by its flag like those of peers. Hence the first of these kernels need not await the end of
// `dispatch_send`. It does so at its own end, for kernels that wait for it.
//
// With PADDED (one chunk), each expert has `num_slots` rows of its own, filled from the front, as `padded.py` describes: rows and
// scales are copied there, and `positions` count these rows. A last block writes the counts alone.
//
// With REPEATS a token may name an expert several times: each entry is a row, and a slot counts as often as it has entries for the
// expert. No expert may have more than `num_slots` rows then.
//
// Macros: those of arrival.cuh, PADDED, REPEATS, FMT (FormatCode), K, EXPERTS (of this rank, at least 1), CHUNK (a multiple of 32), WARPS
// (of a block), LOOPED (a block takes several tasks; for few SMs), PLACES_BYTES (shared memory of `recv_permute`), CONTIGUOUS
// (quants are copied), PER_TOKEN_FLAGS (all slots are one chunk), QUANT_BYTES, SCALE_COLUMNS (0 where scales stay in the
// records), RECORD_BYTES and the *_AT of RecordLayout, words of SignalLayout, COUNT_BITS, TURN_BIT, STALE_HANDLE, MISMATCH, CAPACITY
// and EXPERT_CAPACITY (ErrorCode), DISPATCH_RECV (Phase).

#include "arrival.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int CHUNK_WORDS = CHUNK / 32;
constexpr int ID_WORDS = (2 * K + 15) / 16;  // of 16 bytes; fields of a record are that far apart
constexpr int SCALE_WORDS = FMT == FP8_BLOCK ? SCALE_COLUMNS : (SCALE_COLUMNS + 3) / 4;
constexpr int LANE_SCALES = (SCALE_WORDS + 31) / 32;
constexpr bool TILED_SCALES = SCALE_WORDS > 0 && FMT != FP8_BLOCK && !PER_TOKEN_FLAGS;

// A block takes one task, or, with LOOPED, each task a whole grid further on.
#if LOOPED
#define EACH_TASK(task, tasks) for (u32 task = blockIdx.x; task < static_cast<u32>(tasks); task += gridDim.x)
#else
#define EACH_TASK(task, tasks) if (const u32 task = blockIdx.x; true)
#endif

// What has landed here for the experts of this rank.
struct Landing : Arrival {
  int first_expert, num_local;

  __device__ Landing(const u64 landing, const u64 flags, const int* own, long long landing_half, long long token_flags_half,
                     int max_tokens, int count_tag, int first_expert, int num_local, int epoch)
      : Arrival(landing, flags, own, landing_half, token_flags_half, max_tokens, count_tag, epoch),
        first_expert(first_expert), num_local(num_local) {}

  __device__ float row_scale(int slot) const { return __ldcg(reinterpret_cast<const float*>(record(slot) + ROW_SCALE_AT)); }

  // Calls `found(k, local expert)` for each expert of this rank that the token in `slot` goes to.
  template <class Found>
  __device__ __forceinline__ void each_expert(int slot, Found found) const {
    const int source = slot / max_tokens, token = slot - source * max_tokens;
    if (source >= WORLD) return;
    const int token_flag = __ldcg(token_flags + slot), count = without_sign(__ldcg(counts + source)) - tag;
    uint4 words[ID_WORDS];
#pragma unroll
    for (int i = 0; i < ID_WORDS; ++i) words[i] = __ldcg(reinterpret_cast<const uint4*>(record(slot) + IDS_AT) + i);
    if (token_flag != epoch || token >= count || count > max_tokens) return;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int id = word_of(words[k / 8], k % 8 / 2) >> 16 * (k % 2) & 0xFFFF, local = id - first_expert;
      if (id != NONE && local >= 0 && local < num_local) found(k, local);
    }
  }
};

// Records a stale handle: its half belongs to a later dispatch. For the first warp at least.
__device__ __forceinline__ void check_handle(const Exchange& x, const int* epoch_ptr, int epoch) {
  if (threadIdx.x == 0 && is_stale(epoch_ptr, epoch))
    record_failure(x, STALE_HANDLE, x.rank, DISPATCH_RECV, epoch, 0, 0);
  __syncwarp();
}

// Waits for the tokens of the sources of a chunk of slots. Returns whether this rank has not failed. For a whole block.
__device__ __forceinline__ bool await_chunk(const Exchange& x, const int* own, const int* epoch_ptr, int epoch, int first_slot,
                                            int num_slots, int max_tokens) {
  bool failed = false;
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x, last_slot = min(first_slot + CHUNK, num_slots) - 1;
    const int first = first_slot / max_tokens, last = last_slot / max_tokens;
    check_handle(x, epoch_ptr, epoch);
    const int* flag = own + DISPATCH_FLAG + (epoch & 1) * WORLD + min(lane, WORLD - 1);
    failed = await(x, own, lane >= first && lane <= last, flag, epoch, flag, epoch, DISPATCH_RECV, epoch);
  }
  // One warp has looked: the answer is block-uniform.
  return __syncthreads_or(failed) == 0;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    recv_count(int* chunk_counts, const u64* landing, const u64* token_flags, const u64* signals, const int* epoch_ptr,
                 const int* handle_epoch, int* error, int* latch, int rank, int max_tokens, int count_tag, int num_slots,
                 int first_expert, int num_local, long long landing_half, long long token_flags_half, long long timeout_ns) {
  __shared__ int counts[EXPERTS];
  const Exchange x{signals, error, latch, rank, timeout_ns};
  const int* own = x.words(rank);
  const u64 landed = landing[rank], flags = token_flags[rank];
  asm volatile("griddepcontrol.launch_dependents;");
  const int epoch = load_relaxed(handle_epoch);
  EACH_TASK(chunk, (num_slots + CHUNK - 1) / CHUNK) {
    const int first_slot = chunk * CHUNK;
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) counts[e] = 0;
    const bool good = await_chunk(x, own, epoch_ptr, epoch, first_slot, num_slots, max_tokens);
    const Landing arrived(landed, flags, own, landing_half, token_flags_half, max_tokens, count_tag, first_expert, num_local,
                          epoch);
    for (int s = threadIdx.x; good && s < CHUNK; s += THREADS)
      arrived.each_expert(first_slot + s, [&](int k, int expert) { atomicAdd(&counts[expert], 1); });
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) chunk_counts[chunk * EXPERTS + e] = counts[e];
    if (LOOPED) __syncthreads();
  }
}

// Shared memory of `recv_permute`.
struct Places {
  u32 bits[EXPERTS][CHUNK_WORDS];     // slots of the chunk that go to an expert
  u16 before[EXPERTS][CHUNK_WORDS];   // rows of the expert in the words before
  u16 local[CHUNK][K];                // expert of each entry, or NONE
  int first[EXPERTS];                 // row position of the expert's first row in the chunk
  int offset[EXPERTS], block[EXPERTS];  // of the group and of its scales
  int totals[EXPERTS];
  float row_scale[PER_TOKEN_FLAGS && FMT == NVFP4 ? CHUNK : 1];
  int rows;
#if REPEATS
  int most;     // rows of an expert at most
  bool repeats;  // a slot of the chunk has several entries for an expert
#endif
  bool others;  // the tokens of a source are for another exchange

  // Entries for expert `e` in those slots of `word` that `mask` chooses.
  __device__ __forceinline__ int entries(int e, int word, u32 mask) const {
#if REPEATS
    if (repeats) {
      int count = 0;
      for (u32 left = bits[e][word] & mask; left; left &= left - 1)
        count += entries_of_slot(e, word * 32 + __ffs(left) - 1, K);
      return count;
    }
#endif
    return __popc(bits[e][word] & mask);
  }

  // Entries for expert `e` among the first `most_k` of slot `s`.
  __device__ __forceinline__ int entries_of_slot(int e, int s, int most_k) const {
    int count = 0;
#pragma unroll
    for (int k = 0; k < K; ++k) count += k < most_k && local[s][k] == e;
    return count;
  }
};
static_assert(sizeof(Places) <= PLACES_BYTES);

// Lanes that count the bits of an expert's words together.
__host__ __device__ constexpr int lanes_of(int words) {
  int lanes = 1;
  while (lanes < words && lanes < 32) lanes *= 2;
  return lanes;
}

extern "C" __global__ void __launch_bounds__(THREADS, PADDED ? 1 : 2)
    recv_permute(const int* chunk_counts, int* group_offsets, int* group_scale_offsets, int* row_index, int* positions,
                 u8* rows, u8* scales, float* row_scale, const u64* landing, const u64* token_flags, const u64* signals,
                 const int* epoch_ptr, const int* handle_epoch, int* error, int* latch, int rank, int max_tokens,
                 int count_tag, int num_slots, int chunks, int split, int shares, int first_expert, int num_local,
                 int capacity, int first_row, long long landing_half, long long token_flags_half,
                 long long timeout_ns
#if PADDED
                 , int* counts, int* source_tokens, long long* layout_range, int* statistics
#endif
    ) {
  extern __shared__ __align__(16) u8 shared[];
  Places& places = *reinterpret_cast<Places*>(shared);
  const Exchange x{signals, error, latch, rank, timeout_ns};
  const int* own = x.words(rank);
  const u64 landed = landing[rank], flags = token_flags[rank];
  asm volatile("griddepcontrol.launch_dependents;");
  const int epoch = load_relaxed(handle_epoch), warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  EACH_TASK(task, chunks * split + PADDED) {
#if PADDED
    const bool counts_alone = task == static_cast<u32>(split);
    const int chunk = 0, first_slot = 0, part = task % split;
#else
    const int chunk = task / split, first_slot = chunk * CHUNK, part = task % split;
#endif
    u32* const bits = reinterpret_cast<u32*>(places.bits);
    u16* const local = reinterpret_cast<u16*>(places.local);
    for (int i = threadIdx.x; i < EXPERTS * CHUNK_WORDS; i += THREADS) bits[i] = 0;
    for (int i = threadIdx.x; i < CHUNK * K; i += THREADS) local[i] = NONE;
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) places.totals[e] = places.first[e] = 0;
#if REPEATS
    if (threadIdx.x == 0) places.repeats = false;
#endif
    [[maybe_unused]] u32 repeated = 0;
    const Landing arrived(landed, flags, own, landing_half, token_flags_half, max_tokens, count_tag, first_expert, num_local,
                          epoch);
    const auto mark = [&](int s, int k, int expert) {
      places.local[s][k] = static_cast<u16>(expert);
      const u32 marked = atomicOr(&places.bits[expert][s / 32], 1u << s % 32);
      if (REPEATS) repeated |= marked >> s % 32 & 1;
    };
    u32 words[LANE_SCALES > 0 ? LANE_SCALES : 1];  // block scales of a slot
    [[maybe_unused]] const auto load_scales = [&](int s) {
      const u8* record = arrived.record(min(first_slot + s, num_slots - 1));
#pragma unroll
      for (int i = 0; i < LANE_SCALES; ++i) {
        const int word = i * 32 + lane;
        words[i] = word < SCALE_WORDS ? __ldcg(reinterpret_cast<const u32*>(record + SCALES_AT) + word) : 0;
        if (FMT != FP8_BLOCK && SCALE_COLUMNS % 4 != 0 && word == SCALE_WORDS - 1)
          words[i] &= (1u << 8 * (SCALE_COLUMNS % 4)) - 1;
      }
    };
#if PER_TOKEN_FLAGS
    __syncthreads();
    check_handle(x, epoch_ptr, epoch);
    bool failed = false;
    for (int s = threadIdx.x; s < CHUNK; s += THREADS) {
      failed |= await_slots(x, own, arrived, s, DISPATCH_RECV);
      const Glance glance(x, own);  // loaded with the ids
      if (FMT == NVFP4) places.row_scale[s] = s < num_slots ? arrived.row_scale(s) : 0.0f;
      arrived.each_expert(s, [&](int k, int expert) {
        mark(s, k, expert);
        atomicAdd(&places.totals[expert], 1);
      });
      __syncwarp();
      if (glance.trouble()) adopt_aborts(x), failed = true;
    }
#if REPEATS
    if (repeated) places.repeats = true;
#endif
    // All warps have looked; the answer is block-uniform.
    bool good = __syncthreads_or(failed) == 0;
    // The scales of a warp's first slot are on their way while rows are counted.
    if constexpr (SCALE_WORDS > 0) load_scales((warp * split + part) % CHUNK);
#else
    // The slots of this chunk are looked at while `recv_count` still counts those of all.
    bool good = await_chunk(x, own, epoch_ptr, epoch, first_slot, num_slots, max_tokens);
    for (int s = threadIdx.x; good && s < CHUNK; s += THREADS)
      arrived.each_expert(first_slot + s, [&](int k, int expert) { mark(s, k, expert); });
#if REPEATS
    if (repeated) places.repeats = true;
#endif
    asm volatile("griddepcontrol.wait;" ::: "memory");
    // What `recv_count` has found has made its counts wrong.
    const bool failed = threadIdx.x == 0 && x.failed();
#pragma unroll 4
    for (int i = threadIdx.x; i < chunks * EXPERTS; i += THREADS) {
      const int count = chunk_counts[i];
      atomicAdd(&places.totals[i % EXPERTS], count);
      if (i / EXPERTS < chunk) atomicAdd(&places.first[i % EXPERTS], count);
    }
    good = __syncthreads_or(failed) == 0 && good;
#endif
    // The first warp sums the totals, the others count the rows of this chunk.
    constexpr int LANES = lanes_of(CHUNK_WORDS), AT_ONCE = 32 / LANES, COUNTING = WARPS > 1 ? WARPS - 1 : 1;
    for (int first = (WARPS > 1 ? warp - 1 : warp) * AT_ONCE; first >= 0 && first < EXPERTS; first += COUNTING * AT_ONCE) {
      const int e = first + lane / LANES;
      int here = 0;
      for (int start = 0; start < CHUNK_WORDS; start += LANES) {
        const int word = start + lane % LANES;
        const bool there = e < EXPERTS && word < CHUNK_WORDS;
        const int count = there ? places.entries(e, word, ALL) : 0;
        int upto = count;
#pragma unroll
        for (int d = 1; d < LANES; d *= 2) {
          const int other = __shfl_up_sync(ALL, upto, d);
          if (lane % LANES >= d) upto += other;
        }
        if (there) places.before[e][word] = static_cast<u16>(here + upto - count);
        here += __shfl_sync(ALL, upto, lane | (LANES - 1));
      }
    }
    if (warp == 0) {
      int row = 0, block = 0;
      [[maybe_unused]] int most = 0;
      for (int start = 0; start < EXPERTS; start += 32) {
        const int e = start + lane, count = e < EXPERTS ? places.totals[e] : 0, blocks = (count + 127) / 128;
        int rows_upto = count, blocks_upto = blocks;
        if (REPEATS) most = max(most, count);
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
          const int more_rows = __shfl_up_sync(ALL, rows_upto, d), more_blocks = __shfl_up_sync(ALL, blocks_upto, d);
          if (lane >= d) rows_upto += more_rows, blocks_upto += more_blocks;
        }
        if (e < EXPERTS) {
          places.offset[e] = row + rows_upto - count;
          places.block[e] = block + blocks_upto - blocks;
          places.first[e] += row + rows_upto - count;
        }
        row += __shfl_sync(ALL, rows_upto, 31);
        block += __shfl_sync(ALL, blocks_upto, 31);
      }
      if (lane == 0) places.rows = row;
#if REPEATS
      most = __reduce_max_sync(ALL, most);
      if (lane == 0) places.most = most;
#endif
    }
    if (warp == WARPS - 1) {
      const bool others = good && arrived.check_sources(x, DISPATCH_RECV);
      if (lane == 0) places.others = others;
    }
    __syncthreads();
    good = good && !places.others;
#if REPEATS
    const bool crowded = places.most > num_slots;
    if (good && crowded && blockIdx.x == 0 && threadIdx.x == 0)
      record_failure(x, EXPERT_CAPACITY, rank, DISPATCH_RECV, epoch, places.most, num_slots);
    good = good && !crowded;
#endif
    const bool fits = places.rows <= capacity;  // a variable: nvcc takes 40 registers, else 48
    if (good && !fits && blockIdx.x == 0 && threadIdx.x == 0)
      record_failure(x, CAPACITY, rank, DISPATCH_RECV, epoch, places.rows, capacity);
    good = good && fits;
#if PADDED
    if (counts_alone) {
#else
    if (blockIdx.x == 0) {
#endif
      for (int e = threadIdx.x; e < num_local; e += THREADS) {
        group_offsets[e] = good ? places.offset[e] : 0;
        group_scale_offsets[e] = good ? places.block[e] - places.offset[e] / 128 : 0;
      }
      if (threadIdx.x == 0) group_offsets[num_local] = good ? places.rows : 0;
#if PADDED
      for (int e = threadIdx.x; e < num_local; e += THREADS) {
        counts[e] = good ? places.totals[e] : 0;
        if (good && statistics != nullptr) statistics[e] += places.totals[e];
      }
      // Rows of an expert from slots before `s`.
      const auto rows_before = [&](int e, int s) {
        if (s >= num_slots) return places.totals[e];
        return places.before[e][s / 32] + places.entries(e, s / 32, (1u << s % 32) - 1);
      };
      for (int i = threadIdx.x; i < num_local * WORLD; i += THREADS) {
        const int e = i / WORLD, first = i % WORLD * max_tokens;
        const long long begin = rows_before(e, first), end = rows_before(e, first + max_tokens);
        layout_range[i] = good ? begin << 32 | (end - begin) : 0;
      }
#endif
    }
    // Another block may not have seen the failure yet: whatever it writes, row_index must point to rows that exist.
    if (!good)
      for (int r = threadIdx.x; r < capacity; r += THREADS) row_index[r] = 0;

    const int landing_row = first_row * (epoch & 1);
    // Unit `share * CHUNK + s`: of the rows of slot s, those whose number is `share` modulo `shares`.
#if PADDED
    const int units = counts_alone ? 0 : CHUNK * shares;
#else
    const int units = CHUNK * shares;
#endif
    for (int unit = warp * split + part; unit < units; unit += split * WARPS) {
      const int share = unit / CHUNK, s = unit % CHUNK, slot = first_slot + s;
      if (slot >= num_slots) continue;
      int position = -1;
      long long at_scales = 0;
      if (lane < K) {
        const int e = good ? places.local[s][lane] : NONE;
        if (e != NONE) {
          const int word = s / 32;
          position = places.first[e] + places.before[e][word] + places.entries(e, word, (1u << s % 32) - 1);
#if REPEATS
          if (places.repeats) position += places.entries_of_slot(e, s, lane);
#endif
          // The row's first byte in the 128x4 swizzle of its group's scales.
          const int row = position - places.offset[e];
#if PADDED
          at_scales = static_cast<long long>(e) * SCALE_COLUMNS * num_slots + row;
          position = e * num_slots + row;
#else
          at_scales = static_cast<long long>(places.block[e] + row / 128) * SCALE_WORDS * 512 + row % 32 * 16 + row % 128 / 32 * 4;
#endif
        }
        if (share == 0) positions[static_cast<long long>(slot) * K + lane] = position;
      }
      const u32 rows_of_slot = __ballot_sync(ALL, position >= 0);
      const bool mine = position >= 0 && __popc(rows_of_slot & ((1u << lane) - 1)) % static_cast<u32>(shares) == share;
      const u32 present = __ballot_sync(ALL, mine);
      if (present == 0) continue;
      const u8* record = arrived.record(slot);
#if PADDED
      if (mine) source_tokens[position] = slot % max_tokens;
#else
      if (mine) row_index[position] = landing_row + slot;
#endif
      // Loaded with the block scales, stored after them.
      const float decode = FMT != NVFP4 ? 0.0f : PER_TOKEN_FLAGS ? places.row_scale[s] : arrived.row_scale(slot);
      if constexpr (SCALE_WORDS > 0 && !TILED_SCALES)
        if (!PER_TOKEN_FLAGS || unit != warp * split + part) load_scales(s);
      [[maybe_unused]] const auto store_scales = [&] {
        for (u32 left = present; left; left &= left - 1) {
          const int k = __ffs(left) - 1;
          const long long row = __shfl_sync(ALL, position, k);
          const long long at = __shfl_sync(ALL, at_scales, k);
#pragma unroll
          for (int i = 0; i < LANE_SCALES; ++i) {
            const int word = i * 32 + lane;
            if (word >= SCALE_WORDS) continue;
            if (PADDED) reinterpret_cast<u32*>(scales)[at + static_cast<long long>(word) * num_slots] = words[i];
            else if (FMT == FP8_BLOCK) reinterpret_cast<u32*>(scales)[row * SCALE_COLUMNS + word] = words[i];
            else *reinterpret_cast<u32*>(scales + at + word * 512) = words[i];
          }
        }
      };
      // Scales of padded rows lie far apart: they are stored when the rows have been loaded.
      if constexpr (SCALE_WORDS > 0 && !TILED_SCALES && !PADDED) store_scales();
      if (FMT == NVFP4 && mine) row_scale[position] = decode;
      if constexpr (CONTIGUOUS) {
        // Of padded rows a warp copies few: the fewer rounds, the better.
        constexpr int WIDTH = QUANT_BYTES % 16 == 0 ? 16 : 8, PIECES = QUANT_BYTES / WIDTH, AT_ONCE = PADDED ? 14 : 8;
        using Piece = typename Wide<WIDTH>::type;
        const Piece* from = reinterpret_cast<const Piece*>(record);
        for (int start = 0; start < PIECES; start += 32 * AT_ONCE) {
          Piece pieces[AT_ONCE];
#pragma unroll
          for (int i = 0; i < AT_ONCE; ++i)
            if (start + i * 32 + lane < PIECES) pieces[i] = __ldcg(from + start + i * 32 + lane);
          for (u32 left = present; left; left &= left - 1) {
            const long long row = __shfl_sync(ALL, position, __ffs(left) - 1);
            Piece* to = reinterpret_cast<Piece*>(rows + row * QUANT_BYTES);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
              if (start + i * 32 + lane < PIECES) to[start + i * 32 + lane] = pieces[i];
          }
        }
      }
      if constexpr (SCALE_WORDS > 0 && PADDED) store_scales();
    }
    if (LOOPED) __syncthreads();
  }
  // So that a kernel that waits for this one also waits for `dispatch_send`.
  if (PER_TOKEN_FLAGS) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Swizzled scales of the arrived rows, in the order of the swizzle: a warp takes 128 rows and COLUMN_WORDS words of 4 columns.
// Lane l takes rows l, l + 32, l + 64 and l + 96, which lie side by side.
constexpr int COLUMN_WORDS = 16;

extern "C" __global__ void __launch_bounds__(THREADS)
    recv_scales(const int* group_offsets, const int* row_index, u8* scales, const u64* landing, int rank, int num_local) {
  __shared__ int offsets[EXPERTS + 1], blocks[EXPERTS + 1];
  const u8* landed = reinterpret_cast<const u8*>(landing[rank]);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  for (int e = threadIdx.x; e <= num_local; e += THREADS) offsets[e] = group_offsets[e];
  __syncthreads();
  if (threadIdx.x == 0) {
    int block = 0;
    for (int e = 0; e < num_local; ++e) blocks[e] = block, block += (offsets[e + 1] - offsets[e] + 127) / 128;
    blocks[num_local] = block;
  }
  __syncthreads();
  constexpr int PARTS = SCALE_WORDS == 0 ? 1 : (SCALE_WORDS + COLUMN_WORDS - 1) / COLUMN_WORDS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, tasks = blocks[num_local] * PARTS;
  for (int task = blockIdx.x * WARPS + warp; task < tasks; task += gridDim.x * WARPS) {
    const int block = task / PARTS, first_word = task % PARTS * COLUMN_WORDS;
    int group = 0;
    for (int high = num_local; high - group > 1;) {
      const int middle = (group + high) / 2;
      if (blocks[middle] <= block) group = middle;
      else high = middle;
    }
    const int first = offsets[group] + (block - blocks[group]) * 128, end = offsets[group + 1];
    const u32* from[4];
    int rows = 0;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int position = first + q * 32 + lane;
      from[q] = nullptr;
      if (position < end) {
        from[q] = reinterpret_cast<const u32*>(landed + static_cast<long long>(row_index[position]) * RECORD_BYTES + SCALES_AT);
        ++rows;
      }
    }
    u8* to = scales + static_cast<long long>(block) * SCALE_WORDS * 512 + lane * 16;
    // 16 bytes of a row at a time: rows lie far apart, and each load costs the same.
    for (int word = first_word; word < min(first_word + COLUMN_WORDS, SCALE_WORDS); word += 4) {
      uint4 of_rows[4];
#pragma unroll
      for (int q = 0; q < 4; ++q)
        of_rows[q] = from[q] != nullptr ? *reinterpret_cast<const uint4*>(from[q] + word) : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (word + i >= SCALE_WORDS) break;
        u32 words[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          words[q] = i == 0 ? of_rows[q].x : i == 1 ? of_rows[q].y : i == 2 ? of_rows[q].z : of_rows[q].w;
          if (SCALE_COLUMNS % 4 != 0 && word + i == SCALE_WORDS - 1) words[q] &= (1u << 8 * (SCALE_COLUMNS % 4)) - 1;
        }
        u8* at = to + (word + i) * 512;
        if (rows == 4) *reinterpret_cast<uint4*>(at) = make_uint4(words[0], words[1], words[2], words[3]);
        else
#pragma unroll
          for (int q = 0; q < 4; ++q)
            if (from[q] != nullptr) reinterpret_cast<u32*>(at)[q] = words[q];
      }
    }
  }
}
