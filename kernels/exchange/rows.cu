// Rows of DeepEP's normal mode: a token goes once to each rank that wants it, with its scales, expert ids and weights,
// and becomes a row there, by source rank and then by token. Nothing is computed, so that copy engines move all of it.
//
// `dispatch_send_rows`: a warp takes a token, has it loaded into shared memory, puts what belongs to it behind it, and
// has the record stored on each peer that wants it, in the slot of its number among the tokens for this peer. The flag
// of a slot says that its record has landed.
// `dispatch_recv_rows`: a warp takes a row. The rows of this rank's own tokens are copied from where the caller has
// them, those of peers from their slots as they land. Both kernels run at the same time, each in its half of an SM's
// shared memory, or, where SMs are limited, on half of the SMs. How many rows come before a row is known from
// `dispatch_counts`.
//
// A step takes the tokens whose numbers begin with `window`, `max_tokens` of them for each pair of ranks.
//
// With OWN_TOO, for rows that are copied to several places afterwards, this rank's own records land here, too, and rows
// stay where they landed: `row_index` says where.
//
// Flags are the epoch with its sign bit inverted, which no other kernel takes for its own. Peers learn of the epoch and
// of its end by the same words as in dispatch_send.cu.
//
// Macros: those of row_stages.cuh with TURN_BIT and COUNT_BITS, TOKEN_BYTES, SCALES (fp32 ones of a token), K (its
// expert ids and weights), OWN_TOO, words of SignalLayout, DISPATCH_SEND and DISPATCH_RECV (Phase).

#include "row_stages.cuh"

constexpr int IDS_AT = TOKEN_BYTES + 4 * SCALES, WEIGHTS_AT = IDS_AT + 4 * K, SOURCE_AT = WEIGHTS_AT + 4 * K;

static_assert(TOKEN_BYTES % 16 == 0, "TOKEN_BYTES: copies are of 16 bytes");
static_assert(RECORD_BYTES >= SOURCE_AT + 4, "RECORD_BYTES: too few for what travels");
static_assert(K <= 32, "K: a lane has an expert of a token");
static_assert(WARPS >= 1 && WARPS <= 31, "WARPS: one more has no row");

// It is even where the epoch is, unlike what the flags of the epoch's half are before anybody has written them.
__device__ __forceinline__ int landed_flag(int epoch) {
  return static_cast<int>(static_cast<u32>(epoch) ^ 0x80000000u);
}

// What the caller brings of each token besides itself; strides are of elements. `weights` may be null.
struct Fields {
  const void* scales;
  long long scale_row, scale_column;
  const long long* ids;
  long long id_row, id_column;
  const void* weights;
  long long weight_row, weight_column;

  __device__ __forceinline__ u32 scale(int token, int v) const {
    return static_cast<const u32*>(scales)[token * scale_row + v * scale_column];
  }
  __device__ __forceinline__ int id(int token, int k) const {
    return static_cast<int>(ids[token * id_row + k * id_column]);
  }
  __device__ __forceinline__ u32 weight(int token, int k) const {
    return weights == nullptr ? 0 : static_cast<const u32*>(weights)[token * weight_row + k * weight_column];
  }
};

// `after_counts`: the kernel before is `dispatch_counts`, which has waited for all before it.
extern "C" __global__ void __launch_bounds__(32 * WARPS + 32, 1)
    dispatch_send_rows(const u8* tokens, const void* scales, long long scale_row, long long scale_column,
                       const long long* ids, long long id_row, long long id_column, const void* weights,
                       long long weight_row, long long weight_column, const int* index, int num_tokens, int window,
                       int after_counts, int count_tag, const u64* landing, const u64* token_flags, const u64* signals,
                       int* epoch_ptr, int* handle_epoch, int* error, int* latch, int* counter, int rank,
                       int max_tokens, long long landing_half, long long token_flags_half, long long timeout_ns) {
  extern __shared__ __align__(128) u8 shared[];  // [WARPS][STAGES][PITCH]
  __shared__ u64 barriers[WARPS * STAGES];
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, peer = min(lane, WORLD - 1);
  const Exchange x{signals, error, latch, rank, timeout_ns};
  const Fields fields{scales, scale_row, scale_column, ids, id_row, id_column, weights, weight_row, weight_column};
  const int* own = x.words(rank);
  int* const words_of_lane = x.words(peer);
  init_barriers(barriers);
  if (!after_counts || warp == WARPS) asm volatile("griddepcontrol.wait;" ::: "memory");
  const int epoch = load_relaxed(epoch_ptr) + 1, half = epoch & 1;
  if (warp == WARPS) {
    // Rows may be received from now on: the counts are there, and so is the epoch.
    if (blockIdx.x == 0 && lane == 0) {
      store_relaxed(handle_epoch, epoch);
      __threadfence();
    }
    __syncwarp();
    asm volatile("griddepcontrol.launch_dependents;");
  } else {
    if (blockIdx.x == 0 && warp == 0 && lane < WORLD) store_release(words_of_lane + READY + rank, epoch);
    Stages stages{shared + warp * STAGES * PITCH, shared_address(barriers + warp * STAGES)};
    // The next token from `token` on that goes to a peer, and, in the lane of each of these, its slot there, else -1.
    const int stride = gridDim.x * WARPS;
    auto advance = [&](int& token, int& slot) {
      for (; token < num_tokens; token += stride) {
        slot = -1;
        if (lane < WORLD && (OWN_TOO || lane != rank)) {
          const int number = __ldcg(index + static_cast<long long>(token) * WORLD + lane) - window;
          if (number >= 0 && number < max_tokens) slot = rank * max_tokens + number;
        }
        if (__any_sync(ALL, slot >= 0)) return;
      }
      slot = -1;
    };
    const u64 landing_of_lane = landing[peer] + half * landing_half;
    int* const flags_of_lane = reinterpret_cast<int*>(token_flags[peer] + half * token_flags_half);
    int token = blockIdx.x * WARPS + warp, slot;
    advance(token, slot);
    if (token < num_tokens) stages.load(tokens + static_cast<long long>(token) * TOKEN_BYTES, TOKEN_BYTES);
    // Peers no longer read this half: they have entered this epoch, or combined the one that used the half before.
    const bool failed = await_free(x, own, lane < WORLD && lane != rank, own + READY + peer,
                                   own + COMBINE_FLAG + half * WORLD + peer, DISPATCH_SEND, epoch);
    if (failed) await_abort_sent(x);
    else if (blockIdx.x == 0 && warp == 0 && lane < WORLD)
      store_relaxed(words_of_lane + half * WORLD + rank + TOKEN_COUNT,
                    min(num_tokens, max_tokens) + tag_of(count_tag, epoch));
    Flags flags{flags_of_lane, landed_flag(epoch)};
    while (token < num_tokens) {
      int then = token + stride, slot_then;
      advance(then, slot_then);
      if (then < num_tokens) stages.load(tokens + static_cast<long long>(then) * TOKEN_BYTES, TOKEN_BYTES);
      u8* const record = stages.at(stages.current);
      for (int v = lane; v < SCALES; v += 32) reinterpret_cast<u32*>(record + TOKEN_BYTES)[v] = fields.scale(token, v);
      if (lane < K) {
        reinterpret_cast<int*>(record + IDS_AT)[lane] = fields.id(token, lane);
        reinterpret_cast<u32*>(record + WEIGHTS_AT)[lane] = fields.weight(token, lane);
      }
      if (lane == 0) *reinterpret_cast<int*>(record + SOURCE_AT) = token;
      bulk_fence();
      stages.await_load();
      if (failed) break;
      const u64 to = landing_of_lane + static_cast<long long>(slot) * RECORD_BYTES;
      for (u32 left = __ballot_sync(ALL, slot >= 0); left; left &= left - 1) {
        const u64 at = __shfl_sync(ALL, to, __ffs(left) - 1);
        if (lane == 0) bulk_store(at, record, RECORD_BYTES);
      }
      flags.store_behind(slot);
      token = then, slot = slot_then;
    }
    while (stages.current < stages.next) stages.await_load();
    flags.store_all();
  }
  end_epoch(epoch_ptr, epoch, counter, words_of_lane + half * WORLD + rank + DISPATCH_FLAG);
}

// Where a row comes from and goes to.
struct Row {
  int row, source, token, slot;  // `token` of this rank's own rows, `slot` of others; the other one is -1

  __device__ __forceinline__ bool there() const { return row >= 0; }
};

// `also_ids` gets the same as `out_ids`. `positions` are `[W, room, W]`: the row of each token that comes, by source
// and token, in the column of this rank. Both, `source_tokens` and `row_index` may be null.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    dispatch_recv_rows(const u8* tokens, const void* scales, long long scale_row, long long scale_column,
                       const long long* ids, long long id_row, long long id_column, const void* weights,
                       long long weight_row, long long weight_column, const int* index, const int* prefix,
                       int num_tokens, int window, const u64* landing, const u64* token_flags, const u64* signals,
                       const int* handle_epoch, int* error, int* latch, u8* out_tokens, void* out_scales,
                       long long out_scale_row, long long out_scale_column, long long* out_ids, long long* also_ids,
                       void* out_weights, int* source_tokens, int* positions, int* row_index, int room, int num_rows,
                       int first_expert, int num_experts, int first_row, int rank, int max_tokens,
                       long long landing_half, long long token_flags_half, long long timeout_ns) {
  extern __shared__ __align__(128) u8 shared[];  // [WARPS][STAGES][PITCH]
  __shared__ u64 barriers[WARPS * STAGES];
  constexpr int SOURCES = OWN_TOO ? WORLD : WORLD - 1;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, peer = min(lane, WORLD - 1);
  const Exchange x{signals, error, latch, rank, timeout_ns};
  const Fields fields{scales, scale_row, scale_column, ids, id_row, id_column, weights, weight_row, weight_column};
  const int* own = x.words(rank);
  init_barriers(barriers);
  asm volatile("griddepcontrol.launch_dependents;");
  // `dispatch_counts` had ended when this kernel began.
  const int epoch = load_relaxed(handle_epoch), half = epoch & 1;
  const int before = peer > 0 ? __ldcg(prefix + (peer - 1) * WORLD + rank) : 0;
  const int upto = __ldcg(prefix + peer * WORLD + rank);
  const int count = lane < WORLD ? max(0, min(upto - before - window, max_tokens)) : 0;
  const int came = min(__shfl_sync(ALL, upto, WORLD - 1), num_rows);
  const int most = __reduce_max_sync(ALL, OWN_TOO || lane != rank ? count : 0);
  const int own_first = __shfl_sync(ALL, before, rank) + window;
  const u8* records = reinterpret_cast<const u8*>(landing[rank]) + half * landing_half;
  const int* flags = reinterpret_cast<const int*>(token_flags[rank] + half * token_flags_half);
  const int first = blockIdx.x * WARPS + warp, stride = gridDim.x * WARPS;
  bool failed = Glance(x, own).trouble();
  if (failed) adopt_aborts(x);

  Stages stages{shared + warp * STAGES * PITCH, shared_address(barriers + warp * STAGES)};
  int token = failed || OWN_TOO ? num_tokens : first, other = failed || SOURCES == 0 ? 0x7FFFFFFF : first;
  // This rank's own tokens first, since nobody has to be awaited for them; then one row of each peer, and so on.
  auto next = [&] {
    Row found{-1, rank, -1, -1};
    for (; token < num_tokens; token += stride) {
      const int number = __ldcg(index + static_cast<long long>(token) * WORLD + rank) - window;
      if (number < 0 || number >= max_tokens || own_first + number >= num_rows) continue;
      found.row = own_first + number, found.token = token;
      token += stride;
      return found;
    }
    for (; SOURCES > 0 && other / max(SOURCES, 1) < most; other += stride) {
      const int number = other / max(SOURCES, 1), source = (rank + 1 + other % max(SOURCES, 1)) % WORLD;
      const int row = __shfl_sync(ALL, before, source) + window + number;
      if (number >= __shfl_sync(ALL, count, source) || row >= num_rows) continue;
      found.row = row, found.source = source, found.slot = source * max_tokens + number;
      other += stride;
      return found;
    }
    return found;
  };
  auto record_of = [&](const Row& row) { return records + static_cast<long long>(row.slot) * RECORD_BYTES; };
  // Whether it can be read: of a record of a peer, whether it has landed.
  auto has_landed = [&](const Row& row) {
    return row.slot < 0 || __any_sync(ALL, lane == 0 && load_acquire(flags + row.slot) == landed_flag(epoch));
  };
  auto await_landed = [&](const Row& row) {
    if (has_landed(row)) return true;
    auto behind = [&] { return lane == row.source && load_acquire(flags + row.slot) != landed_flag(epoch); };
    failed = await_while(x, own, behind, DISPATCH_RECV, epoch);
    return !failed;
  };
  auto load = [&](const Row& row) {
    if (OWN_TOO) return;
    if (row.slot >= 0) {
      asm volatile("fence.proxy.async.global;" ::: "memory");  // what this warp saw is visible to the copy engine
      stages.load(record_of(row), RECORD_BYTES);
    } else {
      stages.load(tokens + static_cast<long long>(row.token) * TOKEN_BYTES, TOKEN_BYTES);
    }
  };
  auto finish = [&](const Row& row) {
    const u8* const record = OWN_TOO ? record_of(row) : stages.await_load();
    const bool is_own = row.slot < 0;
    // A word of the record. In memory, lines of other records are beside it, which may not have landed yet.
    auto word_at = [&](int at) {
      const u32* const word = reinterpret_cast<const u32*>(record + at);
      return OWN_TOO ? __ldcg(word) : *word;
    };
    const long long to = row.row;
    if (!OWN_TOO)
      for (int v = lane; v < SCALES; v += 32)
        static_cast<u32*>(out_scales)[to * out_scale_row + v * out_scale_column] =
            is_own ? fields.scale(row.token, v) : word_at(TOKEN_BYTES + 4 * v);
    if (lane < K) {
      const int id = is_own ? fields.id(row.token, lane) : static_cast<int>(word_at(IDS_AT + 4 * lane));
      const u32 weight = is_own ? fields.weight(row.token, lane) : word_at(WEIGHTS_AT + 4 * lane);
      const int local = id - first_expert;
      const bool here = id >= 0 && local >= 0 && local < num_experts;
      out_ids[to * K + lane] = here ? local : -1;
      if (also_ids != nullptr) also_ids[to * K + lane] = here ? local : -1;
      static_cast<u32*>(out_weights)[to * K + lane] = here ? weight : 0;
    }
    if (lane == 0) {
      const int at_source = is_own ? row.token : static_cast<int>(word_at(SOURCE_AT));
      if (source_tokens != nullptr) source_tokens[to] = at_source;
      if (positions != nullptr) {
        const long long slot = static_cast<long long>(row.source) * room + at_source;
        positions[slot * WORLD + rank] = row.row;
      }
      if (row_index != nullptr) row_index[to] = half * first_row + row.slot;
      if (!OWN_TOO) {
        bulk_store(reinterpret_cast<u64>(out_tokens) + to * TOKEN_BYTES, record, TOKEN_BYTES);
        bulk_commit();
      }
    }
    __syncwarp();  // all lanes have read the stage before it is loaded anew
  };

  Row row = next();
  if (row.there() && await_landed(row)) load(row);
  while (row.there() && !failed) {
    const Row then = next();
    // It is loaded meanwhile if it is there already, else awaited once this one is done.
    const bool early = then.there() && has_landed(then);
    if (early) load(then);
    finish(row);
    if (then.there() && !early && await_landed(then)) load(then);
    row = then;
  }
  // Rows that nothing comes for.
  for (long long i = (failed ? 0 : came) + first; window == 0 && lane < K && i < num_rows; i += stride) {
    out_ids[i * K + lane] = -1, static_cast<u32*>(out_weights)[i * K + lane] = 0;
    if (also_ids != nullptr) also_ids[i * K + lane] = -1;
  }
  if (lane == 0) bulk_await();
  // So that a kernel that waits for this one also waits for `dispatch_send_rows`.
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
