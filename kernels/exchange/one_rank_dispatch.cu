// Dispatch of few tokens of a rank alone, in one launch: quantizes them, and groups their rows by expert, as
// `dispatch_send` and `recv_permute` do for ranks that wait for each other. No block waits for another: each looks at
// the routing of all tokens and finds the place of every row by itself.
//
// A block takes a token. It makes its record in shared memory and stores it in its landing slot, and, as the layer asks
// for, quants, block scales and row scales at the rows of its experts. Flags and counts are stored for kernels that
// look at them later; nothing is ordered by them, so such kernels must not begin before this one has ended.
//
// Macros: those of signalling.cuh with WORLD 1, FMT (FormatCode), HIDDEN, K, IDS (type of the expert ids), ROUTER_IDS
// (they are those of a router, to be numbered by `own_expert`), EXPERTS, MOST (tokens, a multiple of 32), THREADS,
// STATIC_GSF, CONTIGUOUS (quants are copied), QUANT_BYTES, SCALE_COLUMNS (0 where scales stay in the records),
// COUNT_BITS, TURN_BIT, RECORD_BYTES and the *_AT of RecordLayout, words of SignalLayout, ROUTING and CAPACITY
// (ErrorCode), DISPATCH_SEND and DISPATCH_RECV (Phase).

#include "own_expert.cuh"
#include "signalling.cuh"
#include "token_units.cuh"

static_assert(WORLD == 1, "WORLD: this kernel is for a rank without peers");
static_assert(THREADS % 32 == 0 && THREADS <= 1024, "THREADS: whole warps of a block");
static_assert(HIDDEN % unit_numbers(FMT) == 0, "HIDDEN: a thread quantizes whole units");
static_assert(K >= 1 && K <= 32, "K: a lane of a warp has an entry of a token's routing");
static_assert(MOST % 32 == 0 && MOST <= 128, "MOST: scales of an expert's rows are one block of 128");
static_assert(MOST * K < 65536, "MOST: rows are counted in the lower half of a word");

constexpr int SENT_BYTES = (WEIGHTS_AT + 4 * K + 15) / 16 * 16;
constexpr int ID_WORDS = (2 * K + 15) / 16;  // of 16 bytes
static_assert(IDS_AT % 16 == 0, "IDS_AT: ids are read 16 bytes at a time");
static_assert(SENT_BYTES <= RECORD_BYTES && RECORD_BYTES % 16 == 0, "RECORD_BYTES: too few for a record");
constexpr int WORDS = MOST / 32, WARPS = THREADS / 32;
constexpr int ENTRIES = (MOST * K + THREADS - 1) / THREADS;  // of a thread
constexpr int SCALE_WORDS = FMT == FP8_BLOCK ? SCALE_COLUMNS : (SCALE_COLUMNS + 3) / 4;

// The ids of experts here, from those that the kernel is given.
struct Numbering {
  int first_id, router_experts;

  __device__ __forceinline__ long long operator()(long long id, float weight) const {
    return ROUTER_IDS ? own_expert(id, weight, first_id, EXPERTS, router_experts) : id;
  }
};

// Records the first id that is out of range or repeated in its token. For one thread.
__device__ __noinline__ void record_bad_id(const Exchange x, const IDS* topk_idx, const float* topk_weights,
                                           const Numbering number, int num_tokens, int epoch) {
  const auto id_of = [&](int entry) { return number(topk_idx[entry], topk_weights[entry]); };
  for (int entry = 0; entry < num_tokens * K; ++entry) {
    const long long id = id_of(entry);
    bool bad = id < -1 || id >= EXPERTS;
    for (int before = entry / K * K; before < entry; ++before) bad |= id >= 0 && id_of(before) == id;
    if (!bad) continue;
    record_failure(x, ROUTING, x.rank, DISPATCH_SEND, epoch, recorded_id(id), entry / K);
    return;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    one_rank_dispatch(const u16* x_TH, long long x_stride, const IDS* topk_idx, const float* topk_weights,
                      const float* static_gsf, int num_tokens, int count_tag, int* group_offsets,
                      int* group_scale_offsets, int* row_index, int* positions, u8* rows, u8* scales, float* row_scale,
                      const u64* landing, const u64* token_flags, const u64* signals, int* epoch_ptr, int* handle_epoch,
                      int* num_parts, int* error, int* latch, int* counter, int num_slots, int capacity, int first_row,
                      int first_id, int router_experts, long long landing_half, long long token_flags_half) {
  extern __shared__ __align__(128) u8 shared[];
  u8* const record = shared;                                        // [RECORD_BYTES]
  u32* const bits = reinterpret_cast<u32*>(shared + RECORD_BYTES);  // [EXPERTS][WORDS], tokens that go to an expert
  u32* const before = bits + EXPERTS * WORDS;                       // [EXPERTS], what is before the expert
  __shared__ u32 sums[WARPS], maxima[WARPS];
  __shared__ int seen[2];  // the last epoch, and whether this rank has failed
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const Exchange x{signals, error, latch, 0, 0};
  const Numbering number{first_id, router_experts};
  // Tables that never change are read while the kernel before still runs.
  int* const own = x.words(0);
  const u64 landed = landing[0], flags = token_flags[0];
  for (int i = threadIdx.x; i < EXPERTS * WORDS; i += THREADS) bits[i] = 0;
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");

  // All loads of this thread are in flight before the first is awaited.
  if (threadIdx.x == 0) seen[0] = load_relaxed(epoch_ptr), seen[1] = load_relaxed(latch);
  long long ids[ENTRIES];
  float weights[ENTRIES];
#pragma unroll
  for (int i = 0; i < ENTRIES; ++i) {
    const int entry = i * THREADS + threadIdx.x;
    ids[i] = entry < num_tokens * K ? topk_idx[entry] : -1;
    weights[i] = ROUTER_IDS && entry < num_tokens * K ? topk_weights[entry] : 0.0f;
  }
  TokenUnits<FMT, HIDDEN, THREADS> units;
  long long id_of_lane = -1;
  float weight_of_lane = 0.0f;
  const auto load = [&](int token) {
    units.load(x_TH + token * x_stride, threadIdx.x);
    if (warp == 0 && lane < K) {
      id_of_lane = topk_idx[token * K + lane];
      weight_of_lane = topk_weights[token * K + lane];
    }
  };
  if (blockIdx.x < num_tokens) load(blockIdx.x);

  bool bad = false;
#pragma unroll
  for (int i = 0; i < ENTRIES; ++i) {
    const int token = (i * THREADS + threadIdx.x) / K;
    const long long id = number(ids[i], weights[i]);
    const bool in_range = id >= 0 && id < EXPERTS;
    bad |= !in_range && id != -1;
    if (in_range) {
      const u32 bit = 1u << token % 32;
      bad |= (atomicOr(&bits[static_cast<int>(id) * WORDS + token / 32], bit) & bit) != 0;
    }
  }
  bad = __syncthreads_or(bad) != 0;
  const int last_epoch = seen[0], epoch = last_epoch + 1, half = epoch & 1;
  bool good = !bad && seen[1] == 0;
  // The last block to have read the epoch begins the next. The others have used what they read: it cannot change any
  // more.
  int arrived = 0;
  if (threadIdx.x == THREADS - 1 && gridDim.x > 1) arrived = atomicAdd(counter, 1);

  // Rows of experts before, and, from bit 16 on, those of them that have rows.
  u32 total = 0;
  for (int first = 0; first < EXPERTS; first += THREADS) {
    const int e = first + threadIdx.x;
    u32 here = 0;
#pragma unroll
    for (int word = 0; word < WORDS; ++word) here += e < EXPERTS ? __popc(bits[e * WORDS + word]) : 0;
    here += here != 0 ? 1 << 16 : 0;
    u32 upto = here;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const u32 other = __shfl_up_sync(ALL, upto, d);
      if (lane >= d) upto += other;
    }
    if (lane == 31) sums[warp] = upto;
    __syncthreads();
    u32 of_warps = total;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      if (w < warp) of_warps += sums[w];
      total += sums[w];
    }
    if (e < EXPERTS) before[e] = of_warps + upto - here;
    if (EXPERTS > THREADS) __syncthreads();  // all have read the sums
  }
  const int num_rows = total & 0xFFFF;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    if (bad) record_bad_id(x, topk_idx, topk_weights, number, num_tokens, epoch);
    else if (good && num_rows > capacity) record_failure(x, CAPACITY, 0, DISPATCH_RECV, epoch, num_rows, capacity);
  }
  good = good && num_rows <= capacity;
  __syncthreads();
  if (blockIdx.x == 0) {
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) {
      const int row = before[e] & 0xFFFF;
      group_offsets[e] = good ? row : 0;
      group_scale_offsets[e] = good ? static_cast<int>(before[e] >> 16) - row / 128 : 0;
    }
    if (threadIdx.x == 0) {
      group_offsets[EXPERTS] = good ? num_rows : 0;
      store_relaxed(handle_epoch, epoch);
      store_relaxed(own + TOKEN_COUNT + half, with_sign(num_tokens + tag_of(count_tag, epoch)));
      store_relaxed(own + DISPATCH_FLAG + half, epoch);
    }
  }
  const int first = blockIdx.x * THREADS + threadIdx.x, stride = gridDim.x * THREADS;
  for (int i = num_tokens * K + first; i < num_slots * K; i += stride) positions[i] = -1;
  if (!good)
    for (int r = first; r < capacity; r += stride) row_index[r] = 0;

  for (int token = blockIdx.x; token < num_tokens; token += gridDim.x) {
    if (token != blockIdx.x) load(token);
    if constexpr (FMT == NVFP4) {
      u32 amax = units.find_amax();
      if constexpr (!STATIC_GSF) {
        amax = __reduce_max_sync(ALL, amax);
        if (lane == 0) maxima[warp] = amax;
      }
    }
    __syncthreads();  // the record of the token before has been copied
    if (warp == 0) {
      const long long id = number(id_of_lane, weight_of_lane);
      const bool in_range = id >= 0 && id < EXPERTS;
      const bool routed = __any_sync(ALL, in_range);
      if (lane < K) {
        reinterpret_cast<u16*>(record + IDS_AT)[lane] = in_range ? static_cast<u16>(id) : NONE;
        reinterpret_cast<float*>(record + WEIGHTS_AT)[lane] = weight_of_lane;
      }
      if (lane == 0) {
        *reinterpret_cast<int*>(record + SOURCE_AT) = token;
        num_parts[token] = routed;
      }
    }
    float gsf = 1.0f;
    if constexpr (FMT == NVFP4) {
      if constexpr (STATIC_GSF) gsf = *static_gsf;
      else gsf = units.gsf(maxima);
      if (threadIdx.x == 0) *reinterpret_cast<float*>(record + ROW_SCALE_AT) = __fdiv_rn(1.0f, gsf);
    }
    units.quantize(gsf, record, record + SCALES_AT, threadIdx.x);
    __syncthreads();
    int position = -1, block = 0, row = 0;
    if (good && lane < K) {
      const int e = reinterpret_cast<const u16*>(record + IDS_AT)[lane];
      if (e != NONE) {
        for (int word = 0; word < token / 32; ++word) row += __popc(bits[e * WORDS + word]);
        row += __popc(bits[e * WORDS + token / 32] & ((1u << token % 32) - 1));
        position = (before[e] & 0xFFFF) + row;
        block = before[e] >> 16;
      }
    }
    if (warp == 0) {
      if (lane < K) positions[token * K + lane] = position;
      if (position >= 0) {
        row_index[position] = first_row * half + token;
        if (FMT == NVFP4) row_scale[position] = *reinterpret_cast<const float*>(record + ROW_SCALE_AT);
      }
      if (lane == 0) reinterpret_cast<int*>(flags + half * token_flags_half)[token] = epoch;
    }
    if (!good) continue;
    const u64 slot = landed + half * landing_half + static_cast<long long>(token) * RECORD_BYTES;
    // As `dispatch_send` does, the ids alone of a token that goes nowhere.
    const u32 present = __ballot_sync(ALL, position >= 0);
    const int from = present ? 0 : IDS_AT / 16, end = present ? SENT_BYTES / 16 : from + ID_WORDS;
    for (int i = from + threadIdx.x; i < end; i += THREADS)
      reinterpret_cast<uint4*>(slot)[i] = reinterpret_cast<const uint4*>(record)[i];
    if constexpr (SCALE_WORDS > 0 || CONTIGUOUS) {
      for (u32 left = present; left; left &= left - 1) {
        const int k = __ffs(left) - 1;
        const long long at = __shfl_sync(ALL, position, k);
        if constexpr (SCALE_WORDS > 0) {
          // The row's first byte in the 128x4 swizzle of its group's scales.
          const long long block_of = __shfl_sync(ALL, block, k);
          const int in_block = __shfl_sync(ALL, row, k);
          u8* const swizzled = scales + block_of * SCALE_WORDS * 512 + in_block % 32 * 16 + in_block / 32 * 4;
          for (int word = threadIdx.x; word < SCALE_WORDS; word += THREADS) {
            u32 four = reinterpret_cast<const u32*>(record + SCALES_AT)[word];
            if (FMT != FP8_BLOCK && SCALE_COLUMNS % 4 != 0 && word == SCALE_WORDS - 1)
              four &= (1u << 8 * (SCALE_COLUMNS % 4)) - 1;
            if (FMT == FP8_BLOCK) reinterpret_cast<u32*>(scales)[at * SCALE_COLUMNS + word] = four;
            else *reinterpret_cast<u32*>(swizzled + word * 512) = four;
          }
        }
        if constexpr (CONTIGUOUS) {
          constexpr int WIDTH = QUANT_BYTES % 16 == 0 ? 16 : 8;
          using Piece = typename Wide<WIDTH>::type;
          for (int piece = threadIdx.x; piece < QUANT_BYTES / WIDTH; piece += THREADS)
            reinterpret_cast<Piece*>(rows + at * QUANT_BYTES)[piece] = reinterpret_cast<const Piece*>(record)[piece];
        }
      }
    }
  }
  if (threadIdx.x == THREADS - 1 && arrived == static_cast<int>(gridDim.x) - 1) {
    *counter = 0;
    *epoch_ptr = epoch;
  }
}
