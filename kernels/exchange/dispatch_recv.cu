// Arrival (dispatch_recv, permute): groups the records that landed here by expert, in an order that depends on nothing
// else.
//
// Slots of the landing region are worked on in chunks of CHUNK. For each expert a chunk has a bitmap of the slots that
// go to it, so that the place of a row is a count of bits.
//
// - `recv_count` counts the rows of each chunk by expert. It is launched only where there are several chunks.
// - `recv_permute` makes the bitmaps of its chunk, finds the place of each row, and copies row scales, and, as the
// layer
//   asks for, block scales and quants. A warp takes a slot. Where slots are few, several warps of different blocks
//   share the rows of one: an SM stores each word of a swizzled row into a sector of its own.
// - `recv_scales` copies swizzled scales where there are several chunks, in the order of the swizzle.
//
// How tokens are awaited:
// - PER_TOKEN_FLAGS (one chunk): each lane awaits its own slot, by the token flag or, from senders that store token
//   flags before the records have landed, by the flag of the source.
// - otherwise: `recv_count` awaits the flag of each source, and so does `recv_permute`, which makes its bitmaps
//   meanwhile.
//
// This rank's own tokens come by its flag like those of peers. Hence the first of these kernels need not await the end
// of `dispatch_send`. It does so at its own end, for kernels that wait for it.
//
// recv_places.cuh has both ways to find what goes where: `mark_arriving_slots` for few slots, `mark_chunk` for many.
// Where rows and their scales lie is in recv_grouped.cuh, or, with PADDED, in recv_padded.cuh.
//
// With PADDED (one chunk), each expert has `num_slots` rows of its own, filled from the front, as `padded.py`
// describes: rows and scales are copied there, and `positions` count these rows. A last block writes the counts alone.
//
// With OWN_ROWS, `placed` tells of which tokens of this rank `dispatch_send` has stored the rows: only their places are
// written here.
//
// With REPEATS a token may name an expert several times: each entry is a row, and a slot counts as often as it has
// entries for the expert. No expert may have more than `num_slots` rows then.
//
// With WAITS, the first block of `recv_count` and of `recv_permute` does no such work. It counts how long this rank
// waits for its peers (waits.cuh), in the first of the kernels that are launched, which gets the words.
//
// Macros: those of arrival.cuh, PADDED, OWN_ROWS, REPEATS, FMT (FormatCode), K, EXPERTS (of this rank, at least 1),
// CHUNK (a multiple of 32), WARPS (of a block), LOOPED (a block takes several tasks; for few SMs), PLACES_BYTES (shared
// memory of `recv_permute`), CONTIGUOUS (quants are copied), PER_TOKEN_FLAGS (all slots are one chunk), QUANT_BYTES,
// SCALE_COLUMNS (0 where scales stay in the records), RECORD_BYTES and the *_AT of RecordLayout, words of SignalLayout,
// COUNT_BITS, TURN_BIT, WAITS, STALE_HANDLE, MISMATCH, CAPACITY and EXPERT_CAPACITY (ErrorCode), DISPATCH_RECV (Phase).

#define FIRST_BLOCK WAITS
#if PADDED
#include "recv_padded.cuh"
#else
#include "recv_grouped.cuh"
#endif
#if WAITS
#include "waits.cuh"
#define COUNT_WAITS()                                                              \
  if (blockIdx.x < FIRST_BLOCK) {                                                  \
    const int sent = DISPATCH_FLAG + (epoch & 1) * WORLD;                          \
    if (waits != nullptr) count_dispatch_waits(x, own, READY, sent, epoch, waits); \
    return;                                                                        \
  }
#else
#define COUNT_WAITS()
#endif

// A block takes one task, or, with LOOPED, each task a whole grid further on.
#if LOOPED
#define EACH_TASK(task, tasks) \
  for (u32 task = blockIdx.x - FIRST_BLOCK; task < static_cast<u32>(tasks); task += gridDim.x - FIRST_BLOCK)
#else
#define EACH_TASK(task, tasks) if (const u32 task = blockIdx.x - FIRST_BLOCK; true)
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    recv_count(int* chunk_counts, const u64* landing, const u64* token_flags, const u64* signals, const int* epoch_ptr,
               const int* handle_epoch, int* error, int* latch, int rank, int max_tokens, int count_tag, int num_slots,
               int first_expert, int num_local, long long landing_half, long long token_flags_half, long long timeout_ns
#if WAITS
               ,
               long long* waits
#endif
    ) {
  __shared__ int counts[EXPERTS];
  const Exchange x{signals, error, latch, rank, timeout_ns};
  const int* own = x.words(rank);
  const u64 landed = landing[rank], flags = token_flags[rank];
  asm volatile("griddepcontrol.launch_dependents;");
  const int epoch = load_relaxed(handle_epoch);
  COUNT_WAITS()
  EACH_TASK(chunk, (num_slots + CHUNK - 1) / CHUNK) {
    const int first_slot = chunk * CHUNK;
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) counts[e] = 0;
    const bool good = await_chunk(x, own, epoch_ptr, epoch, first_slot, num_slots, max_tokens);
    const Landing arrived(landed, flags, own, landing_half, token_flags_half, max_tokens, count_tag, first_expert,
                          num_local, epoch);
    for (int s = threadIdx.x; good && s < CHUNK; s += THREADS)
      arrived.each_expert(first_slot + s, [&](int k, int expert) { atomicAdd(&counts[expert], 1); });
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) chunk_counts[chunk * EXPERTS + e] = counts[e];
    if (LOOPED) __syncthreads();
  }
}

// Block scales of a slot, some in each lane.
struct SlotScales {
  u32 words[LANE_SCALES > 0 ? LANE_SCALES : 1];

  __device__ __forceinline__ void load(const u8* record) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < LANE_SCALES; ++i) {
      const int word = i * 32 + lane;
      words[i] = word < SCALE_WORDS ? __ldcg(reinterpret_cast<const u32*>(record + SCALES_AT) + word) : 0;
      if (FMT != FP8_BLOCK && SCALE_COLUMNS % 4 != 0 && word == SCALE_WORDS - 1)
        words[i] &= (1u << 8 * (SCALE_COLUMNS % 4)) - 1;
    }
  }

  // To the rows of those lanes that are `present`.
  __device__ __forceinline__ void store(const RowLayout& layout, u32 present, int position, long long at_scales,
                                        int num_slots) const {
    const int lane = threadIdx.x & 31;
    for (u32 left = present; left; left &= left - 1) {
      const int k = __ffs(left) - 1;
      const long long row = __shfl_sync(ALL, position, k), at = __shfl_sync(ALL, at_scales, k);
#pragma unroll
      for (int i = 0; i < LANE_SCALES; ++i) {
        const int word = i * 32 + lane;
        if (word < SCALE_WORDS) layout.store_scale(row, at, word, words[i], num_slots);
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, PADDED ? 1 : 2)
    recv_permute(const int* chunk_counts, int* group_offsets, int* group_scale_offsets, int* row_index, int* positions,
                 u8* rows, u8* scales, float* row_scale, const u64* landing, const u64* token_flags, const u64* signals,
                 const int* epoch_ptr, const int* handle_epoch, int* error, int* latch, int rank, int max_tokens,
                 int count_tag, int num_slots, int chunks, int split, int shares, int first_expert, int num_local,
                 int capacity, int first_row, long long landing_half, long long token_flags_half, long long timeout_ns
#if PADDED
                 ,
                 int* counts, int* source_tokens, long long* layout_range, int* statistics
#endif
#if OWN_ROWS
                 ,
                 const int* placed
#endif
#if WAITS
                 ,
                 long long* waits
#endif
    ) {
  extern __shared__ __align__(16) u8 shared[];
  Places& places = *reinterpret_cast<Places*>(shared);
  const Exchange x{signals, error, latch, rank, timeout_ns};
  const int* own = x.words(rank);
  const u64 landed = landing[rank], flags = token_flags[rank];
  asm volatile("griddepcontrol.launch_dependents;");
  const int epoch = load_relaxed(handle_epoch), warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  COUNT_WAITS()
#if PADDED
  const RowLayout layout{group_offsets, group_scale_offsets, scales, counts, source_tokens, layout_range, statistics};
#else
  const RowLayout layout{group_offsets, group_scale_offsets, row_index, scales, first_row, epoch};
#endif
  EACH_TASK(task, chunks * split + RowLayout::EXTRA_TASKS) {
    const int chunk = PADDED ? 0 : task / split, first_slot = chunk * CHUNK, part = task % split;
    places.clear();
    const Landing arrived(landed, flags, own, landing_half, token_flags_half, max_tokens, count_tag, first_expert,
                          num_local, epoch);
    SlotScales slot_scales;
#if PER_TOKEN_FLAGS
    bool good = mark_arriving_slots(places, x, own, arrived, epoch_ptr, num_slots);
    // The scales of a warp's first slot are on their way while rows are counted.
    if constexpr (SCALE_WORDS > 0) slot_scales.load(arrived.record(min((warp * split + part) % CHUNK, num_slots - 1)));
#else
    bool good = mark_chunk(places, x, own, arrived, epoch_ptr, num_slots, chunk_counts, chunk, chunks);
#endif
    // The first warp sums the totals, the others count the rows of this chunk.
    places.count_before(WARPS > 1 ? 1 : 0);
    if (warp == 0) places.add_up_totals();
    if (warp == WARPS - 1) {
      const bool others = good && arrived.check_sources(x, DISPATCH_RECV);
      if (lane == 0) places.others = others;
    }
    __syncthreads();
    good = places.fit(x, good, num_slots, capacity, epoch);
    const bool writes_counts = layout.writes_counts(task, split);
    if (writes_counts) layout.write_counts(places, good, num_local, num_slots, max_tokens);
    // Another block may not have seen the failure yet: whatever it writes, row_index must point to rows that exist.
    if (!good)
      for (int r = threadIdx.x; r < capacity; r += THREADS) row_index[r] = 0;

    // Unit `share * CHUNK + s`: of the rows of slot s, those whose number is `share` modulo `shares`.
    const int units = PADDED && writes_counts ? 0 : CHUNK * shares;
    for (int unit = warp * split + part; unit < units; unit += split * WARPS) {
      const int share = unit / CHUNK, s = unit % CHUNK, slot = first_slot + s;
      if (slot >= num_slots) continue;
      int position = -1;
      long long at_scales = 0;
      if (lane < K) {
        const int e = good ? places.local[s][lane] : NONE;
        if (e != NONE) {
          position = places.position_of(e, s, lane);
          at_scales = layout.place(places, e, position, num_slots);
        }
        if (share == 0) positions[static_cast<long long>(slot) * K + lane] = position;
      }
      const u32 rows_of_slot = __ballot_sync(ALL, position >= 0);
      const bool mine = position >= 0 && __popc(rows_of_slot & ((1u << lane) - 1)) % static_cast<u32>(shares) == share;
      const u32 present = __ballot_sync(ALL, mine);
      if (present == 0) continue;
      const u8* record = arrived.record(slot);
      if (mine) layout.store_source(position, slot, max_tokens);
#if OWN_ROWS
      if (slot / max_tokens == rank && __ldcg(placed + slot % max_tokens) != 0) continue;
#endif
      // Loaded with the block scales, stored after them.
      const float decode = FMT != NVFP4 ? 0.0f : PER_TOKEN_FLAGS ? places.row_scale[s] : arrived.row_scale(slot);
      if constexpr (SCALE_WORDS > 0 && !TILED_SCALES)
        if (!PER_TOKEN_FLAGS || unit != warp * split + part) slot_scales.load(record);
      // Scales of padded rows lie far apart: they are stored when the rows have been loaded.
      if constexpr (SCALE_WORDS > 0 && !TILED_SCALES && !PADDED)
        slot_scales.store(layout, present, position, at_scales, num_slots);
      if (FMT == NVFP4 && mine) row_scale[position] = decode;
      if constexpr (CONTIGUOUS) {
        constexpr int WIDTH = QUANT_BYTES % 16 == 0 ? 16 : 8, PIECES = QUANT_BYTES / WIDTH,
                      AT_ONCE = RowLayout::PIECES_AT_ONCE;
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
      if constexpr (SCALE_WORDS > 0 && PADDED) slot_scales.store(layout, present, position, at_scales, num_slots);
    }
    if (LOOPED) __syncthreads();
  }
  // So that a kernel that waits for this one also waits for `dispatch_send`.
  if (PER_TOKEN_FLAGS) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Swizzled scales of the arrived rows, in the order of the swizzle: a warp takes 128 rows and COLUMN_WORDS words of 4
// columns. Lane l takes rows l, l + 32, l + 64 and l + 96, which lie side by side.
constexpr int COLUMN_WORDS = 16;

extern "C" __global__ void __launch_bounds__(THREADS)
    recv_scales(const int* group_offsets, const int* row_index, u8* scales, const u64* landing, int rank,
                int num_local) {
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
        from[q] = reinterpret_cast<const u32*>(landed + static_cast<long long>(row_index[position]) * RECORD_BYTES +
                                               SCALES_AT);
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
