// Rows of DeepEP's normal mode on their way home: a token is the sum of its rows on all ranks, and so are its weights.
//
// `combine_send_rows`: a warp takes a row of a peer's token, has it loaded into shared memory, puts its weights behind
// it, and has the record stored at home, in a slot for each token and peer. The flag of a slot says that its record has
// landed.
// `combine_recv_rows`: a warp takes a token, awaits its records, and sums them in fp32, biases first, then ranks
// ascending, or, with ENTRIES, in the order of their last entries in the token. The row that this rank itself has of it
// is read where the caller has it. Both kernels run at the same time.
//
// A step takes `room` tokens of each rank, from `start` on. It is an epoch of its own, whose flags no other kernel
// takes for its own: the epoch with bit 30 turned over. A half of the region for sums is free once its rank has entered
// the epoch, since by then it has summed those before.
//
// Macros: those of row_stages.cuh with TURN_BIT and COUNT_BITS, HIDDEN (elements of a row), K (weights of a row),
// SUM_WARPS (of a block that sums), BIASES (at most 2), ENTRIES (of a token's routing at home, or 0), words of
// SignalLayout, COMBINE_SEND and COMBINE_RECV (Phase).

#include "row_stages.cuh"

constexpr int ROW_BYTES = 2 * HIDDEN, WEIGHTS_AT = ROW_BYTES;
constexpr int PEERS = WORLD - 1;
constexpr int AT_ONCE = 4;  // units of 16 bytes of a row that a lane has at a time
constexpr int UNITS = HIDDEN / 8;

static_assert(HIDDEN % 8 == 0, "HIDDEN: a lane reads 16 bytes at a time");
static_assert(RECORD_BYTES >= ROW_BYTES + 4 * K, "RECORD_BYTES: too few for what travels");
static_assert(K <= 32, "K: a lane has a weight of a row");
static_assert(ENTRIES >= 0 && ENTRIES <= 32, "ENTRIES: a lane has an entry of a token's routing");
static_assert(BIASES >= 0 && BIASES <= 2, "BIASES: none, one or two");
static_assert(WARPS >= 1 && WARPS <= 32 && SUM_WARPS >= 1 && SUM_WARPS <= 24, "WARPS, SUM_WARPS: of a block");

__device__ __forceinline__ int flag_of(int epoch) { return epoch ^ 0x40000000; }

// Slot of rank `of`'s record of a token at home on rank `home`, which has none of its own.
__device__ __forceinline__ long long slot_of(int token, int of, int home) {
  return static_cast<long long>(token) * PEERS + (of < home ? of : of - 1);
}

// The bits of weight `lane` of a row, which is 0 where `ids`, if given, has no expert.
__device__ __forceinline__ u32 weight_of(const void* weights, long long weight_row, long long weight_column,
                                         const long long* ids, int row) {
  const int lane = threadIdx.x & 31;
  if (ids != nullptr && ids[static_cast<long long>(row) * K + lane] < 0) return 0;
  return static_cast<const u32*>(weights)[row * weight_row + lane * weight_column];
}

// `source_tokens` are the tokens of the rows at their ranks, which are in the order of `prefix` (see row_counts.cu).
extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    combine_send_rows(const u8* rows, const void* weights, long long weight_row, long long weight_column,
                      const long long* ids, const int* source_tokens, const int* prefix, int num_rows, int start,
                      int room, int count_tag, const u64* combine, const u64* token_flags, const u64* signals,
                      int* epoch_ptr, int* handle_epoch, int* error, int* latch, int* counter, int rank,
                      long long combine_half, long long token_flags_half, long long timeout_ns) {
  extern __shared__ __align__(128) u8 shared[];  // [WARPS][STAGES][PITCH]
  __shared__ u64 barriers[WARPS * STAGES];
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, peer = min(lane, WORLD - 1);
  const Exchange x{signals, error, latch, rank, timeout_ns};
  const int* own = x.words(rank);
  int* const words_of_lane = x.words(peer);
  init_barriers(barriers);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int epoch = load_relaxed(epoch_ptr) + 1, half = epoch & 1;
  if (warp == 0) {
    if (blockIdx.x == 0) {
      if (lane == 0) {
        store_relaxed(handle_epoch, epoch);
        __threadfence();
      }
      if (lane < WORLD) store_release(words_of_lane + READY + rank, epoch);
      __syncwarp();
    }
    asm volatile("griddepcontrol.launch_dependents;");
  }
  const int before = peer > 0 ? __ldcg(prefix + (peer - 1) * WORLD + rank) : 0;
  const int count = lane < WORLD ? min(__ldcg(prefix + peer * WORLD + rank), num_rows) - before : 0;
  const int most = __reduce_max_sync(ALL, lane != rank ? count : 0);
  Stages stages{shared + warp * STAGES * PITCH, shared_address(barriers + warp * STAGES)};
  const int stride = gridDim.x * WARPS;
  int next = PEERS > 0 ? blockIdx.x * WARPS + warp : 0x7FFFFFFF;
  // The next row of a token of this step: one of each peer in turn. False where there is none.
  int row, home, token;
  auto advance = [&] {
    for (; PEERS > 0 && next / max(PEERS, 1) < most; next += stride) {
      const int number = next / max(PEERS, 1);
      home = (rank + 1 + next % max(PEERS, 1)) % WORLD, row = __shfl_sync(ALL, before, home) + number;
      if (number >= __shfl_sync(ALL, count, home)) continue;
      token = source_tokens[row] - start;
      if (token < 0 || token >= room) continue;
      next += stride;
      return true;
    }
    return false;
  };
  bool there = advance();
  if (there) stages.load(rows + static_cast<long long>(row) * ROW_BYTES, ROW_BYTES);
  const int* ready = own + READY + peer;
  const bool failed = await(x, own, lane < WORLD && lane != rank, ready, epoch, COMBINE_SEND, epoch);
  if (failed) await_abort_sent(x);
  else if (blockIdx.x == 0 && warp == 0 && lane < WORLD)
    store_relaxed(words_of_lane + half * WORLD + rank + TOKEN_COUNT, tag_of(count_tag, epoch));  // no token comes
  Flags flags{reinterpret_cast<int*>(token_flags[peer] + half * token_flags_half), flag_of(epoch)};
  while (there) {
    const int this_row = row, to_rank = home, this_token = token;
    there = advance();
    if (there) stages.load(rows + static_cast<long long>(row) * ROW_BYTES, ROW_BYTES);
    u8* const record = stages.at(stages.current);
    if (lane < K)
      reinterpret_cast<u32*>(record + WEIGHTS_AT)[lane] = weight_of(weights, weight_row, weight_column, ids, this_row);
    if (K > 0) bulk_fence();
    stages.await_load();
    if (failed) break;
    const long long slot = slot_of(this_token, rank, to_rank);
    if (lane == 0) bulk_store(combine[to_rank] + half * combine_half + slot * RECORD_BYTES, record, RECORD_BYTES);
    flags.store_behind(lane == to_rank ? static_cast<int>(slot) : -1);
  }
  while (stages.current < stages.next) stages.await_load();
  flags.store_all();
  end_epoch(epoch_ptr, epoch, counter, words_of_lane + half * WORLD + rank + DISPATCH_FLAG);
}

__device__ __forceinline__ void add_unit(float (&total)[8], const uint4& unit) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const u32 word = word_of(unit, n / 2);
    total[n] = __fadd_rn(total[n], __uint_as_float(n % 2 == 0 ? word << 16 : word & 0xFFFF0000u));
  }
}

// `index`, `home_ids` (experts of the tokens, `num_local` of which are one rank's), `y`, `out_weights` and the biases
// begin with the first of the `num_tokens` tokens of this step.
extern "C" __global__ void __launch_bounds__(32 * SUM_WARPS, 24 / SUM_WARPS)
    combine_recv_rows(const u8* rows, const void* weights, long long weight_row, long long weight_column,
                      const long long* ids, const int* index, const int* prefix, const long long* home_ids,
                      int num_local, int num_tokens, int num_rows, const u8* bias, const u8* bias_2, const u64* combine,
                      const u64* token_flags, const u64* signals, const int* handle_epoch, int* error, int* latch,
                      u8* y, float* out_weights, int rank, long long combine_half, long long token_flags_half,
                      long long timeout_ns) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const Exchange x{signals, error, latch, rank, timeout_ns};
  const int* own = x.words(rank);
  asm volatile("griddepcontrol.launch_dependents;");
  // What was before `combine_send_rows` had ended when this kernel began.
  const int epoch = load_relaxed(handle_epoch), half = epoch & 1, tag = flag_of(epoch);
  const int own_first = rank > 0 ? __ldcg(prefix + (rank - 1) * WORLD + rank) : 0;
  const u8* landed = reinterpret_cast<const u8*>(combine[rank]) + half * combine_half;
  const int* flags = reinterpret_cast<const int*>(token_flags[rank] + half * token_flags_half);
  bool failed = Glance(x, own).trouble();
  if (failed) adopt_aborts(x);
  for (int token = blockIdx.x * SUM_WARPS + warp; token < num_tokens; token += gridDim.x * SUM_WARPS) {
    const int number = lane < WORLD ? __ldcg(index + static_cast<long long>(token) * WORLD + lane) : -1;
    const int expert = lane < ENTRIES ? static_cast<int>(home_ids[static_cast<long long>(token) * ENTRIES + lane]) : -1;
    const int own_row = own_first + __shfl_sync(ALL, number, rank);
    u32 parts = __ballot_sync(ALL, number >= 0 && (lane != rank || own_row < num_rows));
    // Where the part of the lane's rank is.
    const long long slot = slot_of(token, lane, rank);
    bool wanted = number >= 0 && lane != rank;
    auto behind = [&] {
      if (wanted) wanted = load_acquire(flags + slot) != tag;
      return wanted;
    };
    if (!failed && __any_sync(ALL, behind())) failed = await_while(x, own, behind, COMBINE_RECV, epoch);
    if (failed) parts = 0;
    u64 at = reinterpret_cast<u64>(lane == rank ? rows + static_cast<long long>(own_row) * ROW_BYTES
                                                : landed + slot * RECORD_BYTES);
    int owner = lane;
    if (ENTRIES > 0) {
      // From here on a lane has the part of the rank of its entry, if that is the last entry of this rank.
      owner = expert >= 0 && expert < num_local * WORLD ? expert / num_local : WORLD;
      const u32 same = __match_any_sync(ALL, owner);
      at = __shfl_sync(ALL, at, owner & 31);
      parts = __ballot_sync(ALL, owner < WORLD && same >> lane == 1 && parts >> owner & 1);
    }
    for (int first = 0; first < UNITS; first += 32 * AT_ONCE) {
      float total[AT_ONCE][8] = {};
      auto add = [&](const u8* from, bool last, const u8* also) {
        uint4 units[2][AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          const int unit = first + i * 32 + lane;
          if (unit < UNITS) units[0][i] = __ldcg(reinterpret_cast<const uint4*>(from) + unit);
          if (unit < UNITS && !last) units[1][i] = __ldcg(reinterpret_cast<const uint4*>(also) + unit);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          if (first + i * 32 + lane >= UNITS) continue;
          add_unit(total[i], units[0][i]);
          if (!last) add_unit(total[i], units[1][i]);
        }
      };
      const long long offset = static_cast<long long>(token) * ROW_BYTES;
      if (BIASES > 0) add(bias + offset, BIASES == 1, bias_2 + offset);
      // Two parts at a time, whose loads are in flight together.
      for (u32 left = parts; left;) {
        const u8* from = reinterpret_cast<const u8*>(__shfl_sync(ALL, at, __ffs(left) - 1));
        left &= left - 1;
        const u8* also = reinterpret_cast<const u8*>(__shfl_sync(ALL, at, left ? __ffs(left) - 1 : 0));
        add(from, left == 0, also);
        left &= left - 1;
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int unit = first + i * 32 + lane;
        if (unit >= UNITS) continue;
        uint4 words = make_uint4(0x7FC07FC0u, 0x7FC07FC0u, 0x7FC07FC0u, 0x7FC07FC0u);
        if (!failed)
          words = make_uint4(pack_bf16(total[i][0], total[i][1]), pack_bf16(total[i][2], total[i][3]),
                             pack_bf16(total[i][4], total[i][5]), pack_bf16(total[i][6], total[i][7]));
        reinterpret_cast<uint4*>(y + offset)[unit] = words;
      }
    }
    float sum = 0.0f;
    for (u32 left = K > 0 ? parts : 0; left; left &= left - 1) {
      const int of = __ffs(left) - 1;
      const u64 record = __shfl_sync(ALL, at, of);
      const bool is_own = __shfl_sync(ALL, owner, of) == rank;
      if (lane >= K) continue;
      const u32 word = is_own ? weight_of(weights, weight_row, weight_column, ids, own_row)
                              : __ldcg(reinterpret_cast<const u32*>(record + WEIGHTS_AT) + lane);
      sum = __fadd_rn(sum, __uint_as_float(word));
    }
    if (lane < K) out_weights[static_cast<long long>(token) * K + lane] = failed ? __uint_as_float(0x7FC00000u) : sum;
  }
  // So that a kernel that waits for this one also waits for `combine_send_rows`.
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
