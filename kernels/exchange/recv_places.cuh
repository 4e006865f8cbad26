// Which rows go where: the slots of a chunk by expert, for inclusion by dispatch_recv.cu.

#include "arrival.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int CHUNK_WORDS = CHUNK / 32;
constexpr int ID_WORDS = (2 * K + 15) / 16;  // of 16 bytes; fields of a record are that far apart
constexpr int SCALE_WORDS = FMT == FP8_BLOCK ? SCALE_COLUMNS : (SCALE_COLUMNS + 3) / 4;
constexpr int LANE_SCALES = (SCALE_WORDS + 31) / 32;
constexpr bool TILED_SCALES = SCALE_WORDS > 0 && FMT != FP8_BLOCK && !PER_TOKEN_FLAGS;

static_assert(K >= 1 && K <= 32, "K: a lane of a warp has an entry of a token's routing");
static_assert(EXPERTS >= 1 && EXPERTS < NONE,
              "EXPERTS: at least one, and none has the number that stands for no expert");
static_assert(CHUNK >= 32 && CHUNK % 32 == 0, "CHUNK: bitmaps of slots are whole words");
// With REPEATS an expert that has more rows than a chunk has slots is an error, found by counts of 32 bits.
static_assert(CHUNK < 65536, "CHUNK: rows of an expert in a chunk are counted in 16 bits");
static_assert(WARPS >= 1 && WARPS <= 32, "WARPS: of a block");
static_assert(!PADDED || PER_TOKEN_FLAGS, "PADDED: all slots are one chunk");
static_assert(IDS_AT % 16 == 0, "IDS_AT: ids are read 16 bytes at a time");
static_assert(QUANT_BYTES % 8 == 0, "QUANT_BYTES: quants are copied 8 or 16 bytes at a time");

// What has landed here for the experts of this rank.
struct Landing : Arrival {
  int first_expert, num_local;

  __device__ Landing(const u64 landing, const u64 flags, const int* own, long long landing_half,
                     long long token_flags_half, int max_tokens, int count_tag, int first_expert, int num_local,
                     int epoch)
      : Arrival(landing, flags, own, landing_half, token_flags_half, max_tokens, count_tag, epoch),
        first_expert(first_expert),
        num_local(num_local) {}

  __device__ float row_scale(int slot) const {
    return __ldcg(reinterpret_cast<const float*>(record(slot) + ROW_SCALE_AT));
  }

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
__device__ __forceinline__ bool await_chunk(const Exchange& x, const int* own, const int* epoch_ptr, int epoch,
                                            int first_slot, int num_slots, int max_tokens) {
  bool failed = false;
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x, last_slot = min(first_slot + CHUNK, num_slots) - 1;
    const int first = first_slot / max_tokens, last = last_slot / max_tokens;
    check_handle(x, epoch_ptr, epoch);
    const int* flag = own + DISPATCH_FLAG + (epoch & 1) * WORLD + min(lane, WORLD - 1);
    failed = await(x, own, lane >= first && lane <= last, flag, epoch, DISPATCH_RECV, epoch);
  }
  // One warp has looked: the answer is block-uniform.
  return __syncthreads_or(failed) == 0;
}

// Lanes that count the bits of an expert's words together.
__host__ __device__ constexpr int lanes_of(int words) {
  int lanes = 1;
  while (lanes < words && lanes < 32) lanes *= 2;
  return lanes;
}

// Shared memory of `recv_permute`: how the rows of a chunk are placed.
struct Places {
  u32 bits[EXPERTS][CHUNK_WORDS];       // slots of the chunk that go to an expert
  u16 before[EXPERTS][CHUNK_WORDS];     // rows of the expert in the words before
  u16 local[CHUNK][K];                  // expert of each entry, or NONE
  int first[EXPERTS];                   // row position of the expert's first row in the chunk
  int offset[EXPERTS], block[EXPERTS];  // of the group and of its scales
  int totals[EXPERTS];
  float row_scale[PER_TOKEN_FLAGS && FMT == NVFP4 ? CHUNK : 1];
  int rows;
#if REPEATS
  int most;      // rows of an expert at most
  bool repeats;  // a slot of the chunk has several entries for an expert
#endif
  bool others;  // the tokens of a source are for another exchange

  // For a whole block.
  __device__ __forceinline__ void clear() {
    u32* const all_bits = reinterpret_cast<u32*>(bits);
    u16* const all_local = reinterpret_cast<u16*>(local);
    for (int i = threadIdx.x; i < EXPERTS * CHUNK_WORDS; i += THREADS) all_bits[i] = 0;
    for (int i = threadIdx.x; i < CHUNK * K; i += THREADS) all_local[i] = NONE;
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) totals[e] = first[e] = 0;
#if REPEATS
    if (threadIdx.x == 0) repeats = false;
#endif
  }

  // Marks that entry `k` of slot `s` goes to `expert`. Returns, with REPEATS, 1 if the slot has another entry for it,
  // else 0.
  __device__ __forceinline__ u32 mark(int s, int k, int expert) {
    local[s][k] = static_cast<u16>(expert);
    const u32 marked = atomicOr(&bits[expert][s / 32], 1u << s % 32);
    return REPEATS ? marked >> s % 32 & 1 : 0;
  }

  __device__ __forceinline__ void note_repeats(u32 repeated) {
#if REPEATS
    if (repeated) repeats = true;
#endif
  }

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

  // Counts the rows of each expert in the words before, for warps from `first_warp` on.
  __device__ __forceinline__ void count_before(int first_warp) {
    constexpr int LANES = lanes_of(CHUNK_WORDS), AT_ONCE = 32 / LANES, COUNTING = WARPS > 1 ? WARPS - 1 : 1;
    const int warp = threadIdx.x / 32 - first_warp, lane = threadIdx.x & 31;
    for (int first = warp * AT_ONCE; first >= 0 && first < EXPERTS; first += COUNTING * AT_ONCE) {
      const int e = first + lane / LANES;
      int here = 0;
      for (int start = 0; start < CHUNK_WORDS; start += LANES) {
        const int word = start + lane % LANES;
        const bool there = e < EXPERTS && word < CHUNK_WORDS;
        const int count = there ? entries(e, word, ALL) : 0;
        int upto = count;
#pragma unroll
        for (int d = 1; d < LANES; d *= 2) {
          const int other = __shfl_up_sync(ALL, upto, d);
          if (lane % LANES >= d) upto += other;
        }
        if (there) before[e][word] = static_cast<u16>(here + upto - count);
        here += __shfl_sync(ALL, upto, lane | (LANES - 1));
      }
    }
  }

  // Sums the totals of the experts, in their order. For one warp.
  __device__ __forceinline__ void add_up_totals() {
    const int lane = threadIdx.x & 31;
    int row = 0, scale_block = 0;
    [[maybe_unused]] int largest = 0;
    for (int start = 0; start < EXPERTS; start += 32) {
      const int e = start + lane, count = e < EXPERTS ? totals[e] : 0, blocks = (count + 127) / 128;
      int rows_upto = count, blocks_upto = blocks;
      if (REPEATS) largest = max(largest, count);
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int more_rows = __shfl_up_sync(ALL, rows_upto, d), more_blocks = __shfl_up_sync(ALL, blocks_upto, d);
        if (lane >= d) rows_upto += more_rows, blocks_upto += more_blocks;
      }
      if (e < EXPERTS) {
        offset[e] = row + rows_upto - count;
        block[e] = scale_block + blocks_upto - blocks;
        first[e] += row + rows_upto - count;
      }
      row += __shfl_sync(ALL, rows_upto, 31);
      scale_block += __shfl_sync(ALL, blocks_upto, 31);
    }
    if (lane == 0) rows = row;
#if REPEATS
    largest = __reduce_max_sync(ALL, largest);
    if (lane == 0) most = largest;
#endif
  }

  // Offsets of the groups of rows and of their scales, or zeros. For a whole block.
  __device__ __forceinline__ void write_offsets(int* offsets, int* scale_offsets, bool good, int num_local) const {
    for (int e = threadIdx.x; e < num_local; e += THREADS) {
      offsets[e] = good ? offset[e] : 0;
      scale_offsets[e] = good ? block[e] - offset[e] / 128 : 0;
    }
    if (threadIdx.x == 0) offsets[num_local] = good ? rows : 0;
  }

  // Position among all rows of entry `k` of slot `s`, which goes to expert `e`.
  __device__ __forceinline__ int position_of(int e, int s, int k) const {
    const int word = s / 32;
    int position = first[e] + before[e][word] + entries(e, word, (1u << s % 32) - 1);
#if REPEATS
    if (repeats) position += entries_of_slot(e, s, k);
#endif
    return position;
  }

  // Whether all rows can be placed. The first block records why not. The answer is block-uniform.
  __device__ __forceinline__ bool fit(const Exchange& x, bool good, int num_slots, int capacity, int epoch) const {
    good = good && !others;
#if REPEATS
    const bool crowded = most > num_slots;
    if (good && crowded && blockIdx.x == FIRST_BLOCK && threadIdx.x == 0)
      record_failure(x, EXPERT_CAPACITY, x.rank, DISPATCH_RECV, epoch, most, num_slots);
    good = good && !crowded;
#endif
    const bool fits = rows <= capacity;  // a variable, which takes fewer registers
    if (good && !fits && blockIdx.x == FIRST_BLOCK && threadIdx.x == 0)
      record_failure(x, CAPACITY, x.rank, DISPATCH_RECV, epoch, rows, capacity);
    return good && fits;
  }
};
static_assert(sizeof(Places) <= PLACES_BYTES, "PLACES_BYTES: too few for what recv_permute shares");

// Few slots, which are one chunk: each lane awaits its own slot, marks it and counts its rows. Returns whether this
// rank has not failed; the answer is block-uniform. For a whole block.
__device__ __forceinline__ bool mark_arriving_slots(Places& places, const Exchange& x, const int* own,
                                                    const Landing& arrived, const int* epoch_ptr, int num_slots) {
  __syncthreads();
  check_handle(x, epoch_ptr, arrived.epoch);
  bool failed = false;
  [[maybe_unused]] u32 repeated = 0;
  for (int s = threadIdx.x; s < CHUNK; s += THREADS) {
    failed |= await_slots(x, own, arrived, s, DISPATCH_RECV);
    const Glance glance(x, own);  // loaded with the ids
    if (FMT == NVFP4) places.row_scale[s] = s < num_slots ? arrived.row_scale(s) : 0.0f;
    arrived.each_expert(s, [&](int k, int expert) {
      repeated |= places.mark(s, k, expert);
      atomicAdd(&places.totals[expert], 1);
    });
    __syncwarp();
    if (glance.trouble()) adopt_aborts(x), failed = true;
  }
  places.note_repeats(repeated);
  // All warps have looked; the answer is block-uniform.
  return __syncthreads_or(failed) == 0;
}

// Many slots, for a block that has one chunk of them: awaits the flags of its sources and marks the chunk's slots while
// `recv_count` still counts those of all, then takes the totals from its counts. Returns whether this rank has not
// failed; the answer is block-uniform.
__device__ __forceinline__ bool mark_chunk(Places& places, const Exchange& x, const int* own, const Landing& arrived,
                                           const int* epoch_ptr, int num_slots, const int* chunk_counts, int chunk,
                                           int chunks) {
  const int first_slot = chunk * CHUNK;
  const bool landed = await_chunk(x, own, epoch_ptr, arrived.epoch, first_slot, num_slots, arrived.max_tokens);
  [[maybe_unused]] u32 repeated = 0;
  for (int s = threadIdx.x; landed && s < CHUNK; s += THREADS)
    arrived.each_expert(first_slot + s, [&](int k, int expert) { repeated |= places.mark(s, k, expert); });
  places.note_repeats(repeated);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  // What `recv_count` has found has made its counts wrong.
  const bool failed = threadIdx.x == 0 && x.failed();
#pragma unroll 4
  for (int i = threadIdx.x; i < chunks * EXPERTS; i += THREADS) {
    const int count = chunk_counts[i];
    atomicAdd(&places.totals[i % EXPERTS], count);
    if (i / EXPERTS < chunk) atomicAdd(&places.first[i % EXPERTS], count);
  }
  return __syncthreads_or(failed) == 0 && landed;
}
