// Dispatch: quantizes each token once, in registers, and copies its record to every rank that holds one of its experts.
//
// A team of threads takes a token. It builds the record in shared memory, the copy engine sends it whole, one copy for
// each rank, and the team goes on to the next token. The last block raises the flags, so a flag means that all records
// of this rank have landed.
//
// With PER_TOKEN_FLAGS the token flag of each token is stored on all ranks once its record has landed; ranks that it
// does not go to get its expert ids alone. Receivers then need not wait for the last block. The turn bit of the token
// count says of which epoch it is. The flags are raised too: for ranks without tokens, for failures, and for receivers
// that await nothing else. Without PER_TOKEN_FLAGS the token flag is stored before the record has landed and says only
// that the slot is used.
//
// With OWN_ROWS this rank's own tokens need not come by their records: where `place_own_rows` (own_rows.cu), which runs
// before this kernel and beside it, has found in time where their rows go, the rows are stored at once, and the slot
// gets what follows the scales alone.
//
// Macros: those of signalling.cuh, FMT (FormatCode), HIDDEN, K, IDS (type of the expert ids), ROUTER_IDS (they are
// those of a router, to be numbered by `own_expert`), TEAM (threads), TEAMS (of a block), STATIC_GSF, AWAIT_READY (this
// kernel writes to its peers itself; else to memory where layers of other sizes have written too), PER_TOKEN_FLAGS,
// REPEATS (a token may name an expert several times, and any negative id is none), OWN_ROWS and, with it, QUANT_BYTES,
// SCALE_COLUMNS and those of own_rows.cuh, COUNT_BITS, TURN_BIT, RECORD_BYTES and the *_AT of RecordLayout, words of
// SignalLayout, ROUTING (ErrorCode), DISPATCH_SEND (Phase).

#include "own_expert.cuh"
#include "signalling.cuh"
#include "token_units.cuh"
#if OWN_ROWS
#include "own_rows.cuh"
#endif

constexpr int SENT_BYTES = (WEIGHTS_AT + 4 * K + 15) / 16 * 16;
constexpr int STAGES = 2;
constexpr int ID_WORDS = (2 * K + 15) / 16;  // of 16 bytes; fields of a record are that far apart
constexpr int MAX_THREADS = 896;             // of an SM in several blocks: few enough for 72 registers each

static_assert(K >= 1 && K <= 32, "K: a lane of a warp has an entry of a token's routing");
static_assert(HIDDEN % unit_numbers(FMT) == 0, "HIDDEN: a thread quantizes whole units");
static_assert(!ROUTER_IDS || WORLD == 1, "ROUTER_IDS: for a rank without peers");
static_assert(TEAM % 32 == 0 && TEAM * TEAMS <= 1024, "TEAM: whole warps, and a block has at most 1024 threads");
static_assert(TEAMS >= 1 && TEAMS <= 15, "TEAMS: each has one of 15 named barriers");
static_assert(IDS_AT % 16 == 0 && WEIGHTS_AT % 16 == 0,
              "IDS_AT, WEIGHTS_AT: ids and weights are read 16 bytes at a time");
static_assert(SENT_BYTES <= RECORD_BYTES && RECORD_BYTES % 16 == 0,
              "RECORD_BYTES: the copy engine sends 16 bytes at a time");
#if OWN_ROWS
static_assert(FMT == FP8_BLOCK && !PER_TOKEN_FLAGS && !REPEATS && TEAMS == 1, "OWN_ROWS: of many tokens in FP8");
static_assert(QUANT_BYTES % 16 == 0 && SOURCE_AT % 16 == 0, "OWN_ROWS: the copy engine stores 16 bytes at a time");

// Where the rows of this rank's own tokens go. For the warp that sends.
struct OwnRows {
  OwnPlaces places;
  const int* placing;  // 1 when `places` are there
  u8* rows;
  float* scales;
  int first_expert, num_local, capacity;
  bool known = false, asked = false;

  // Asks, for so long at most, whether the places are known.
  __device__ __forceinline__ void ask(long long patience_ns) {
    const long long start = clock_ns();
    while (!known) {
      known = __any_sync(ALL, (threadIdx.x & 31) == 0 && load_acquire(placing) != 0);
      if (__any_sync(ALL, clock_ns() - start >= patience_ns)) break;
    }
  }

  // In each lane with an entry that stays here, the position of its row, if known; else -1.
  __device__ __forceinline__ int position_of(int token, int expert, int num_experts) const {
    const int lane = threadIdx.x & 31, local = expert - first_expert;
    if (!known || expert < 0 || local < 0 || local >= num_local) return -1;
    return __ldcg(places.first + local) + __ldcg(places.before + token / OWN_TOKENS * num_experts + expert) +
           __ldcg(places.numbers + static_cast<long long>(token) * K + lane);
  }

  // Whether the rows of a token that stays here have these positions.
  __device__ __forceinline__ bool place(int token, int position) const {
    const bool here = known && !__any_sync(ALL, position >= capacity);
    if ((threadIdx.x & 31) == 0) places.placed[token] = here;
    return here;
  }

  // Stores the rows of a token; the copies of quants are to be committed.
  __device__ __forceinline__ void store(const u8* record, int position) const {
    const int lane = threadIdx.x & 31;
    for (u32 left = __ballot_sync(ALL, position >= 0); left; left &= left - 1) {
      const long long row = __shfl_sync(ALL, position, __ffs(left) - 1);
      if (lane == 0) bulk_store(reinterpret_cast<u64>(rows) + row * QUANT_BYTES, record, QUANT_BYTES);
      for (int v = lane; v < SCALE_COLUMNS; v += 32)
        scales[row * SCALE_COLUMNS + v] = reinterpret_cast<const float*>(record + SCALES_AT)[v];
    }
  }
};
#endif

// Entry `lane` of a token's routing.
struct Entry {
  long long id;
  float weight;

  __device__ __forceinline__ Entry(const IDS* topk_idx, const float* topk_weights, int token) {
    const int lane = threadIdx.x & 31;
    id = lane < K ? topk_idx[static_cast<long long>(token) * K + lane] : -1;
    weight = lane < K ? topk_weights[static_cast<long long>(token) * K + lane] : 0.0f;
  }
};

// Returns the ranks that the token goes to, bit p for rank p. `expert` becomes -1 for an id that is unrouted, out of
// range or, without REPEATS, repeated. For a whole warp.
__device__ __forceinline__ u32 route(const Exchange& x, const Entry& entry, int end_of_lane, int num_experts, int token,
                                     int epoch, int& expert) {
  const int lane = threadIdx.x & 31;
  const bool in_range = entry.id >= 0 && entry.id < num_experts;
  expert = in_range ? static_cast<int>(entry.id) : -1 - lane;
  const u32 same = __match_any_sync(ALL, expert);
  const bool repeated = !REPEATS && in_range && (same & ((1u << lane) - 1));
  const u32 bad = __ballot_sync(ALL, repeated || (!REPEATS && entry.id < -1) || entry.id >= num_experts);
  if (bad && lane == __ffs(bad) - 1)
    record_failure(x, ROUTING, x.rank, DISPATCH_SEND, epoch, recorded_id(entry.id), token);
  __syncwarp();
  if (!in_range || repeated) expert = -1;
  const int owner = owner_of(expert, end_of_lane);
  return __reduce_or_sync(ALL, expert >= 0 ? 1u << owner : 0u);
}

extern "C" __global__ void __launch_bounds__(TEAM* TEAMS, MAX_THREADS / (TEAM * TEAMS))
    dispatch_send(const u16* x_TH, long long x_stride, const IDS* topk_idx, const float* topk_weights,
                  const float* static_gsf, int num_tokens, int count_tag, const int* starts, const u64* landing,
                  const u64* token_flags, const u64* signals, int* epoch_ptr, int* handle_epoch, int* num_parts,
                  int* error, int* latch, int* counter, int rank, int num_experts, int max_tokens, int first_id,
                  int router_experts, long long landing_half, long long token_flags_half, long long timeout_ns
#if OWN_ROWS
                  ,
                  int* scratch, int* placing, u8* rows, float* scales, int first_expert, int num_local, int capacity
#endif
    ) {
  extern __shared__ __align__(128) u8 records[];  // [TEAMS][STAGES][RECORD_BYTES]
  __shared__ u32 maxima[TEAMS][TEAM / 32];
  const int team = threadIdx.x / TEAM, thread = threadIdx.x % TEAM, warp = thread / 32, lane = threadIdx.x & 31;
  const int peer = min(lane, WORLD - 1);
  const Exchange x{signals, error, latch, rank, timeout_ns};
  // Tables that never change are read while the kernel before still runs.
  const int* own = x.words(rank);
  int* const words_of_lane = x.words(peer);
  const u64 landing_of_lane = landing[peer], token_flags_of_lane = token_flags[peer];
  const int end_of_lane = starts[peer + 1];
  // `place_own_rows` has waited for what came before it, and this kernel waits for it at its end.
  if (!OWN_ROWS) asm volatile("griddepcontrol.wait;" ::: "memory");
  // All loads of this warp are in flight before the first is awaited.
  const int last_epoch = load_relaxed(epoch_ptr);
  const Glance glance(x, own);
  const int entered = load_relaxed(own + READY + peer);
  const int combined[2] = {load_relaxed(own + COMBINE_FLAG + peer), load_relaxed(own + COMBINE_FLAG + WORLD + peer)};
  if (threadIdx.x >= TEAM * TEAMS - 32) {
    if (blockIdx.x == 0) {
      // Arrival may start before this kernel has ended and must know the epoch that it waits for.
      if (lane == 0) {
        store_relaxed(handle_epoch, last_epoch + 1);
        __threadfence();
      }
      if (lane < WORLD) store_release(words_of_lane + READY + rank, last_epoch + 1);
      __syncwarp();
    }
    asm volatile("griddepcontrol.launch_dependents;");
  }

  const int epoch = last_epoch + 1, half = epoch & 1;
  // Bit p: rank p no longer reads this half, which may be written. It has entered this epoch, or has combined the epoch
  // that used this half before.
  u32 ready = 0;
  const u32 everyone = WORLD == 32 ? ALL : (1u << WORLD) - 1;
  // Waits until all `peers` are ready, and returns whether this rank has failed. For warp 0 of a team.
  auto failed_or_ready = [&](u32 peers, bool first) {
    bool failed = x.failed();
    if (first) {
      if (glance.trouble()) adopt_aborts(x), failed = true;
      ready = __ballot_sync(ALL, !AWAIT_READY || ahead(entered, epoch) >= 0 || combined_before(combined[half], epoch));
      // This block writes count and flag on every peer.
      if (blockIdx.x == 0 && team == 0) peers = everyone;
    }
    if (PER_TOKEN_FLAGS) peers = everyone;
    const u32 wanted = peers & ~ready;
    if (wanted != 0) {
      failed |= await_free(x, own, wanted >> lane & 1, own + READY + peer, own + COMBINE_FLAG + half * WORLD + peer,
                           DISPATCH_SEND, epoch);
      ready |= wanted;
    }
    failed = __any_sync(ALL, failed) != 0;
    // The count is stored early: receivers await it together with token flags, and a flag stored right after it would
    // have to wait until it has landed. Not after a failure: then readers of the half's last count have not been
    // awaited.
    if (!failed && first && blockIdx.x == 0 && team == 0 && lane < WORLD) {
      const int count = num_tokens + tag_of(count_tag, epoch);
      store_relaxed(words_of_lane + half * WORLD + rank + TOKEN_COUNT, PER_TOKEN_FLAGS ? with_sign(count) : count);
    }
    // Arrival may have failed meanwhile. Flags raised without data must come after the abort messages.
    if (failed) await_abort_sent(x);
    return failed;
  };
  if (num_tokens == 0 && warp == 0) failed_or_ready(everyone, true);

#if OWN_ROWS
  OwnRows own_rows{
      OwnPlaces(scratch, max_tokens, num_experts), placing, rows, scales, first_expert, num_local, capacity};
  own_rows.asked = epoch == 0;  // `place_own_rows` does nothing then
#endif
  bool lost = false;
  int stage = 0;
  const int first_token = blockIdx.x * TEAMS + team;
  for (int token = first_token; token < num_tokens; token += gridDim.x * TEAMS, stage ^= 1) {
    u8* record = records + (team * STAGES + stage) * RECORD_BYTES;
    TokenUnits<FMT, HIDDEN, TEAM> units;
    units.load(x_TH + token * x_stride, thread);
    u32 targets = 0;
    int expert = -1;
    [[maybe_unused]] int position = -1;  // of the row of each lane's entry, where OWN_ROWS are stored at once
    if (warp == 0) {
      Entry entry(topk_idx, topk_weights, token);
      if (ROUTER_IDS) entry.id = own_expert(entry.id, entry.weight, first_id, num_experts, router_experts);
      targets = route(x, entry, end_of_lane, num_experts, token, epoch, expert);
      if (lane == 0) num_parts[token] = __popc(targets);
      lost |= failed_or_ready(targets, token == first_token);
      if (lost) targets = 0;
#if OWN_ROWS
      own_rows.ask(0);
      position = own_rows.position_of(token, expert, num_experts);
#endif
      bulk_await_read<STAGES - 1>();
      __syncwarp();
      if (lane < K) {
        reinterpret_cast<u16*>(record + IDS_AT)[lane] = static_cast<u16>(expert);
        reinterpret_cast<float*>(record + WEIGHTS_AT)[lane] = entry.weight;
      }
      if (lane == 0) *reinterpret_cast<int*>(record + SOURCE_AT) = token;
    }
    if constexpr (FMT == NVFP4) {
      u32 amax = units.find_amax();
      if constexpr (!STATIC_GSF) {
        amax = __reduce_max_sync(ALL, amax);
        if (lane == 0) maxima[team][warp] = amax;
      }
    }
    team_barrier(team, TEAM);
    float gsf = 1.0f;
    if constexpr (FMT == NVFP4) {
      if constexpr (STATIC_GSF) gsf = *static_gsf;
      else gsf = units.gsf(maxima[team]);
      if (thread == 0) *reinterpret_cast<float*>(record + ROW_SCALE_AT) = __fdiv_rn(1.0f, gsf);
    }
    units.quantize(gsf, record, record + SCALES_AT, thread);
    bulk_fence();
    team_barrier(team, TEAM);
    if (warp == 0) {
      const long long slot = static_cast<long long>(rank) * max_tokens + token;
      const u64 to = landing_of_lane + half * landing_half + slot * RECORD_BYTES;
      if (PER_TOKEN_FLAGS && !lost && lane < WORLD && !(targets >> lane & 1)) {
#pragma unroll
        for (int i = 0; i < ID_WORDS; ++i)
          reinterpret_cast<uint4*>(to + IDS_AT)[i] = reinterpret_cast<const uint4*>(record + IDS_AT)[i];
      }
      // Without AWAIT_READY the memory may hold anything where no token flag was stored, so each slot gets one.
      const bool goes = targets >> lane & 1;
      if (!PER_TOKEN_FLAGS && lane < WORLD && (goes || !AWAIT_READY))
        store_relaxed(reinterpret_cast<int*>(token_flags_of_lane + half * token_flags_half) + slot,
                      goes ? epoch : ~epoch);
      // One lane starts all copies: the instruction needs its operands in uniform registers.
      for (u32 left = OWN_ROWS ? targets & ~(1u << rank) : targets; left; left &= left - 1) {
        const u64 at = __shfl_sync(ALL, to, __ffs(left) - 1);
        if (lane == 0) bulk_store(at, record, SENT_BYTES);
      }
#if OWN_ROWS
      if (targets >> rank & 1) {
        if (!own_rows.known) {
          own_rows.ask(own_rows.asked ? 0 : OWN_ROWS_PATIENCE_NS);
          position = own_rows.position_of(token, expert, num_experts);
        }
        own_rows.asked = true;
        const bool here = own_rows.place(token, position);
        if (here) own_rows.store(record, position);
        const u64 at = __shfl_sync(ALL, to, rank);
        const int from = here ? SOURCE_AT : 0;
        if (lane == 0) bulk_store(at + from, record + from, SENT_BYTES - from);
      }
#endif
      bulk_commit();
    }
  }

  if (warp == 0) bulk_await();
  if (OWN_ROWS) asm volatile("griddepcontrol.wait;" ::: "memory");
  if (TEAMS > 1) lost = __syncthreads_or(lost);
  if (threadIdx.x < 32) {
    __syncwarp();  // one lane has awaited the copies of a team, all store token flags
    // Flags of tokens come after them by nothing else.
    if (PER_TOKEN_FLAGS) fence_system();
    int* token_flag = reinterpret_cast<int*>(token_flags_of_lane + half * token_flags_half);
    token_flag += static_cast<long long>(rank) * max_tokens;
    for (int first = blockIdx.x * TEAMS; PER_TOKEN_FLAGS && !lost && first < num_tokens; first += gridDim.x * TEAMS)
      for (int token = first; token < min(first + TEAMS, num_tokens); ++token)
        if (lane < WORLD) store_relaxed(token_flag + token, epoch);
    // One lane arrives for all: where the last block has raised the flags, a slot without its token flag counts as
    // unused.
    __syncwarp();
    bool last = false;
    if (lane == 0) last = last_to_arrive(counter);
    last = __any_sync(ALL, last);
    __syncwarp();
    if (last) {
      if (lane == 0) *epoch_ptr = epoch;
#if OWN_ROWS
      if (lane == 0) *placing = 0;
#endif
      if (lane < WORLD) store_release(words_of_lane + half * WORLD + rank + DISPATCH_FLAG, epoch);
    }
  }
}
