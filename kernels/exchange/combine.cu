// Combine: reduces the experts of a rank for each token, sends one partial result home, and sums over ranks.
//
// Both kernels bring rows through a ring of shared memory (row_ring.cuh), so that few SMs have as many bytes in flight
// as their memory holds: one warp pushes the rows that come next, the others read them. A partial result is made in
// shared memory and sent whole by the copy engine.
//
// `y = bf16(shared + sum over ranks ascending of wire(sum over that rank's experts, k ascending, of w_k * bf16(acc)))`,
// sums in fp32, `shared` first and only where there is one. With SUMS_BY_ENTRY ranks are added in the order of their
// last entries in the token. Multiplications and additions are kept apart (no fused multiply-add), so that every engine
// gives the same bits. A NaN is a NaN everywhere, but its sign and payload are the machine's.
//
// Where combine_recv runs concurrently with combine_send, tokens are summed in parts, as the parts arrive from all
// ranks: `early_parts` parts of `part_tokens` tokens are signalled before the rest has landed.
//
// With PARTIAL_FLAGS, for few tokens, combine_send also signals the partial result of each block, if it has only one,
// and combine_recv sums each token as soon as all of its partial results are there.
//
// With AWAIT_TOKENS, combine_send follows a dispatch that nothing has received, of routing alone: it waits for each
// token by itself, and `positions` are rows of an earlier dispatch of the same tokens. An entry without an expert has
// no part in the sum. One warp brings rows, by their positions alone, while another waits for the weights.
//
// With WAITS, the first block of combine_recv does nothing but count how long this rank waits for its peers
// (waits.cuh).
//
// Macros: those of signalling.cuh (with AWAIT_TOKENS those of arrival.cuh), AWAIT_TOKENS, BOTH_HALVES, HIDDEN, WIRE
// (FormatCode), PARTS (partial results of a token), SUMS_BY_ENTRY, PARTIAL_BYTES, PARTIAL_SCALES_AT, COMBINE_FLAG,
// PARTIAL_FLAGS, PARTIAL_FLAG, PARTIAL_FLAG_TOKENS, PROGRESS, PROGRESS_PARTS, K, READERS (warps of combine_send that
// read rows), PLACES (of its ring), WAITING (warps of combine_recv that read rows), PARTIALS (places of its ring),
// OUTPUT_BF16, RECORD_BYTES, IDS_AT, WEIGHTS_AT, HAS_SHARED, WAITS, STALE_HANDLE (ErrorCode), COMBINE_SEND and
// COMBINE_RECV (Phase).

#if AWAIT_TOKENS
#include "arrival.cuh"
#else
#include "signalling.cuh"
#endif
#include "partial.cuh"
#include "expert_output.cuh"
#include "row_ring.cuh"
// Of the blocks that sum in combine_recv.
#if WAITS
#include "waits.cuh"
#define BLOCK (blockIdx.x - 1)
#define BLOCKS (gridDim.x - 1)
#else
#define BLOCK blockIdx.x
#define BLOCKS gridDim.x
#endif

constexpr int UNIT = unit_numbers(WIRE), UNITS = HIDDEN / UNIT,
              PER_THREAD = (UNITS + 32 * READERS - 1) / (32 * READERS);
constexpr int SCALE_BYTES = WIRE == BF16 ? 0 : WIRE == MXFP8 ? HIDDEN / 32 : (HIDDEN + 127) / 128 * 4;
constexpr int SENT_BYTES = (PARTIAL_SCALES_AT + SCALE_BYTES + 15) / 16 * 16;
constexpr int STAGES = 2;  // partial results in the making or being sent
constexpr int OUTPUT_BYTES = OUTPUT_BF16 ? 2 : 4;
constexpr int LOADS = UNIT * OUTPUT_BYTES / 16;
// Marks of a row: what it is, whether it is the token's last, and whether the step has failed.
constexpr u32 OUTPUT = 1, PARTIAL = 2, SHARED = 4, LAST = 8, FAILED = 16;
constexpr u64 END = 0, SIGNAL = 1;  // in place of a row's address at home; both come without a row and with LAST

static_assert(K >= 1 && K <= 32, "K: a lane of a warp has an entry of a token's routing");
static_assert(HIDDEN % 16 == 0, "HIDDEN: threads sum units of 8 or 16 numbers");
static_assert(READERS >= 1 && 32 * READERS + 64 + 32 * AWAIT_TOKENS <= 1024, "READERS: warps of combine_send");
static_assert(WAITING >= 1 && 32 * WAITING + 32 <= 1024, "WAITING: warps of combine_recv");
static_assert(PLACES >= 1 && PARTIALS >= 1, "PLACES, PARTIALS: a ring has a place at least");
static_assert(PARTIAL_SCALES_AT % 16 == 0, "PARTIAL_SCALES_AT: scales begin at 16 bytes");
static_assert(SENT_BYTES <= PARTIAL_BYTES && PARTIAL_BYTES % 16 == 0, "PARTIAL_BYTES: too few for a partial result");
static_assert(IDS_AT % 16 == 0 && WEIGHTS_AT % 16 == 0,
              "IDS_AT, WEIGHTS_AT: ids and weights are read 16 bytes at a time");

// The slot that a lane looks into. Tokens of all ranks take turns, beginning with a neighbour's: so all links are busy
// all the time, and not all ranks send to the same one.
struct Turn {
  int source, token;
  bool there;

  __device__ __forceinline__ Turn(int first, int rank, int num_slots) {
    const int turn = first + (threadIdx.x & 31) * gridDim.x;
    there = turn < num_slots;
    // Nor does a block send to the same rank all the time.
    const int lap = gridDim.x % WORLD == 0 ? turn / gridDim.x : 0;
    source = (rank + 1 + turn + lap) % WORLD, token = there ? turn / WORLD : 0;
  }
};

// Where the partial result of this rank is among those of a token, in the order in which they are added.
struct PartOrder {
  static constexpr bool BY_ENTRY = SUMS_BY_ENTRY;
  u32 ranks = 0;   // that have an expert of the token
  int behind = 0;  // ranks whose last entry comes after this rank's

  // The entries of a token are added in this order.
  __device__ __forceinline__ static constexpr int entry(int number) { return BY_ENTRY ? K - 1 - number : number; }
  __device__ __forceinline__ void add(int owner, int rank) {
    const u32 with = ranks | 1u << owner;
    if (BY_ENTRY && owner == rank && with != ranks) behind = __popc(ranks);
    ranks = with;
  }
  __device__ __forceinline__ int part(int rank) const {
    return BY_ENTRY ? __popc(ranks) - 1 - behind : __popc(ranks & ((1u << rank) - 1));
  }
};

// What a record says of its token's experts. Its fields are 16 bytes apart.
struct RecordRouting {
  static constexpr int ID_WORDS = (2 * K + 15) / 16, WEIGHT_WORDS = (4 * K + 15) / 16;  // of 16 bytes
  uint4 ids[ID_WORDS], weights[WEIGHT_WORDS];

  __device__ __forceinline__ void load(const u8* record) {
#pragma unroll
    for (int i = 0; i < ID_WORDS; ++i) ids[i] = reinterpret_cast<const uint4*>(record + IDS_AT)[i];
#pragma unroll
    for (int i = 0; i < WEIGHT_WORDS; ++i) weights[i] = reinterpret_cast<const uint4*>(record + WEIGHTS_AT)[i];
  }

  __device__ __forceinline__ int id(int k) const { return word_of(ids[k / 8], k % 8 / 2) >> 16 * (k % 2) & 0xFFFF; }
  __device__ __forceinline__ float weight(int k) const { return __uint_as_float(word_of(weights[k / 4], k % 4)); }
};

extern "C" __global__ void __launch_bounds__(32 * READERS + 64 + 32 * AWAIT_TOKENS, 1)
    combine_send(const u8* output, long long row_bytes, const int* positions, const int* starts, const u64* landing,
                 const u64* combine, const u64* signals, const int* epoch_ptr, const int* handle_epoch, int* error,
                 int* latch, int* counter, int rank, int max_tokens, int num_slots, int early_parts, int part_tokens,
                 long long landing_half, long long combine_half
#if AWAIT_TOKENS
                 ,
                 const u64* token_flags, int count_tag, long long token_flags_half, long long timeout_ns,
                 const int* received
#endif
    ) {
#if !AWAIT_TOKENS
  constexpr long long timeout_ns = 0;
#endif
  using Rows = Ring<PLACES, HIDDEN * OUTPUT_BYTES>;
  extern __shared__ __align__(128) u8 shared[];  // rows, then STAGES partial results
  __shared__ Note notes[PLACES];
  __shared__ u64 barriers[2 * PLACES], made[STAGES], taken[STAGES], to_of[STAGES];
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  Rows rows(shared, notes, barriers);
  u8* const partials = shared + Rows::BYTES;
  Place<STAGES> stage;
  const Exchange x{signals, error, latch, rank, timeout_ns};
  if (threadIdx.x == 0) {
    rows.init(READERS, 1 + AWAIT_TOKENS);
    for (int s = 0; s < STAGES; ++s)
      barrier_init(shared_address(made + s), READERS * ARRIVALS_OF_WARP),
          barrier_init(shared_address(taken + s), ARRIVALS_OF_WARP);
  }
  // Tables that never change are read while the kernel before still runs.
  int* const words_of_lane = x.words(min(lane, WORLD - 1));
  const u64 combine_of_lane = combine[min(lane, WORLD - 1)];
  const int end_of_lane = starts[min(lane, WORLD - 1) + 1];
#if !AWAIT_TOKENS
  const u8* landed = reinterpret_cast<const u8*>(landing[rank]);
#endif
  __syncthreads();
#if !AWAIT_TOKENS
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const int epoch = load_relaxed(handle_epoch), half = epoch & 1;

#if AWAIT_TOKENS
  // `dispatch_send` may still run: it began after all rows had been written, and its tokens are awaited by their flags.
  if (warp == READERS + 2) {
    int signalled = 0;
    for (int first = blockIdx.x; first < num_slots; first += 32 * gridDim.x) {
      const auto [source, token, there] = Turn(first, rank, num_slots);
      const int* of_slot = positions + (static_cast<long long>(source) * max_tokens + token) * K;
      int position[K];
      u32 present = 0;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        position[k] = of_slot[k];
        if (there && position[k] >= 0) present |= 1u << k;
      }
      for (u32 left = __ballot_sync(ALL, present != 0); left; left &= left - 1) {
        const int from = __ffs(left) - 1;
        const u32 chosen = __shfl_sync(ALL, present, from);
        const int before = min(__shfl_sync(ALL, token, from) / part_tokens, early_parts);
        for (; signalled < before; ++signalled) rows.load(nullptr, 0);
#pragma unroll
        for (int k = 0; k < K; ++k) {
          const int at = __shfl_sync(ALL, position[k], from);
          if (chosen >> k & 1) rows.load(output + at * row_bytes, HIDDEN * OUTPUT_BYTES);
        }
      }
    }
    for (; signalled <= early_parts; ++signalled) rows.load(nullptr, 0);
  } else if (warp == READERS) {
    const int* own = x.words(rank);
    const Arrival arrived(landing[rank], token_flags[rank], own, landing_half, token_flags_half, max_tokens, count_tag,
                          epoch);
    bool lost = ahead(load_relaxed(epoch_ptr), epoch) >= 2;
    if (lost) {
      if (lane == 0) record_failure(x, STALE_HANDLE, rank, COMBINE_SEND, epoch, 0, 0);
      // `combine_recv` may have found it first and still be sending the abort messages.
      await_abort_sent(x);
    }
    __syncwarp();
    int signalled = 0;
    for (int first = blockIdx.x; first < num_slots; first += 32 * gridDim.x) {
      const auto [source, token, there] = Turn(first, rank, num_slots);
      const int slot = source * max_tokens + token;
      const u8* record = arrived.record(slot);
      u32 loaded = 0, present = 0;
      PartOrder order;
#pragma unroll
      for (int k = 0; k < K; ++k)
        if (positions[static_cast<long long>(slot) * K + k] >= 0 && there) loaded |= 1u << k;
      int id[K];
      float weight[K];
      // After a failure the rows that are on their way are passed by, and nothing is awaited.
      bool failed = lost || await_slots(x, own, arrived, there ? slot : num_slots, COMBINE_SEND);
      const Glance glance(x, own);  // loaded with the ids
      const int sent = there ? without_sign(__ldcg(arrived.counts + source)) - arrived.tag : 0;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        id[k] = __ldcg(reinterpret_cast<const u16*>(record + IDS_AT) + k);
        weight[k] = __ldcg(reinterpret_cast<const float*>(record + WEIGHTS_AT) + k);
        if (id[k] != NONE && token < sent) present |= loaded & 1u << k;
      }
      if (!lost) {
        if (glance.trouble()) adopt_aborts(x), failed = true;
        // Tokens for another exchange: their number is too small or too large.
        const u32 others = __ballot_sync(ALL, sent < 0 || sent > max_tokens);
        if (!failed && others && lane == __ffs(others) - 1)
          record_failure(x, MISMATCH, source, COMBINE_SEND, epoch, exchange_of(sent + arrived.tag),
                         exchange_of(arrived.tag));
        __syncwarp();
        if (failed || others) lost = true, await_abort_sent(x);
      }
#pragma unroll
      for (int n = 0; n < K; ++n) {
        const int k = PartOrder::entry(n), owner = owner_of(id[k], end_of_lane);
        if (id[k] != NONE) order.add(owner, rank);
      }
      const u64 to = __shfl_sync(ALL, combine_of_lane, source) + half * combine_half +
                     (static_cast<long long>(token) * PARTS + order.part(rank)) * PARTIAL_BYTES;
      for (u32 left = __ballot_sync(ALL, loaded != 0); left; left &= left - 1) {
        const int from = __ffs(left) - 1;
        const u32 brought = __shfl_sync(ALL, loaded, from), chosen = lost ? 0 : __shfl_sync(ALL, present, from);
        const u64 home = __shfl_sync(ALL, to, from);
        const int before = min(__shfl_sync(ALL, token, from) / part_tokens, early_parts);
        for (; signalled < before; ++signalled) rows.describe({SIGNAL, 0.0f, LAST});
#pragma unroll
        for (int k = 0; k < K; ++k) {
          const u32 marks = chosen >> k & 1 ? OUTPUT | (chosen >> k == 1 ? LAST : 0) : 0;
          const Note note{home, __shfl_sync(ALL, weight[k], from), marks};
          if (brought >> k & 1) rows.describe(note);
        }
      }
    }
    for (; signalled < early_parts; ++signalled) rows.describe({SIGNAL, 0.0f, LAST});
    rows.describe({END, 0.0f, LAST});
    // Kernels that may begin during this one read what `dispatch_send` writes.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
    // If the dispatch before brought these rows, nothing is left to read of its tokens: peers may write there.
    if (blockIdx.x == 0 && received != nullptr && lane < WORLD && !x.failed()) {
      const int of = load_relaxed(received);
      if (ahead(epoch, of) == 1) store_release(words_of_lane + COMBINE_FLAG + (of & 1) * WORLD + rank, of);
    }
#else
  if (warp == READERS) {
    // Which half is meant is not known yet: with few slots their routing is loaded from both.
    int position[K];
    RecordRouting routing, other;
    const auto load_positions = [&](long long entry) {
#pragma unroll
      for (int k = 0; k < K; ++k) position[k] = positions[entry * K + k];
    };
    if constexpr (BOTH_HALVES) {
      const auto [source, token, there] = Turn(blockIdx.x, rank, num_slots);
      const long long entry = there ? static_cast<long long>(source) * max_tokens + token : 0;
      load_positions(entry);
      routing.load(landed + entry * RECORD_BYTES);
      other.load(landed + landing_half + entry * RECORD_BYTES);
    }
    // A stale handle's slots hold another step's records: their routing must not be used as addresses.
    const bool stale = ahead(load_relaxed(epoch_ptr), epoch) >= 2;
    if (stale) {
      if (lane == 0) record_failure(x, STALE_HANDLE, rank, COMBINE_SEND, epoch, 0, 0);
      // `combine_recv` may have found it first and still be sending the abort messages.
      await_abort_sent(x);
    }
    __syncwarp();
    // Each lane looks into a slot, 32 loads in flight at once.
    const int everything = stale ? 0 : num_slots;
    int signalled = 0;
    for (int first = blockIdx.x; first < everything; first += 32 * gridDim.x) {
      const auto [source, token, there] = Turn(first, rank, num_slots);
      if (!BOTH_HALVES || first != blockIdx.x) {
        const long long entry = static_cast<long long>(source) * max_tokens + token;
        load_positions(entry);
        routing.load(landed + half * landing_half + entry * RECORD_BYTES);
      } else if (half) {
        routing = other;
      }
      u32 present = 0;
      PartOrder order;
#pragma unroll
      for (int n = 0; n < K; ++n) {
        const int k = PartOrder::entry(n), owner = owner_of(routing.id(k), end_of_lane);
        if (routing.id(k) != NONE) order.add(owner, rank);
        if (there && position[k] >= 0) present |= 1u << k;
      }
      const u64 to = __shfl_sync(ALL, combine_of_lane, source) + half * combine_half +
                     (static_cast<long long>(token) * PARTS + order.part(rank)) * PARTIAL_BYTES;
      for (u32 left = __ballot_sync(ALL, present != 0); left; left &= left - 1) {
        const int from = __ffs(left) - 1;
        const u32 chosen = __shfl_sync(ALL, present, from);
        const u64 home = __shfl_sync(ALL, to, from);
        const int before = min(__shfl_sync(ALL, token, from) / part_tokens, early_parts);
        for (; signalled < before; ++signalled) rows.push(nullptr, 0, {SIGNAL, 0.0f, LAST});
#pragma unroll
        for (int k = 0; k < K; ++k) {
          const int at = __shfl_sync(ALL, position[k], from);
          const Note note{home, __shfl_sync(ALL, routing.weight(k), from), OUTPUT | (chosen >> k == 1 ? LAST : 0)};
          if (chosen >> k & 1) rows.push(output + at * row_bytes, HIDDEN * OUTPUT_BYTES, note);
        }
      }
    }
    for (; signalled < early_parts; ++signalled) rows.push(nullptr, 0, {SIGNAL, 0.0f, LAST});
    rows.push(nullptr, 0, {END, 0.0f, LAST});
#endif
  } else if (warp < READERS) {
    float total[PER_THREAD][UNIT] = {};
    for (;;) {
      const Note note = rows.front();
      if (note.marks & OUTPUT) {
        const uint4* row = reinterpret_cast<const uint4*>(rows.row());
        uint4 raw[PER_THREAD][LOADS];
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i)
#pragma unroll
          for (int j = 0; j < LOADS; ++j) raw[i][j] = row[inside(i * 32 * READERS + threadIdx.x, UNITS) * LOADS + j];
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i)
#pragma unroll
          for (int n = 0; n < UNIT; ++n)
            total[i][n] = __fadd_rn(total[i][n], __fmul_rn(note.weight, output_number<OUTPUT_BYTES>(raw[i], n)));
      }
      rows.pop();
      if (!(note.marks & LAST)) continue;
      barrier_wait(shared_address(taken + stage.index), stage.parity ^ 1);
      if (threadIdx.x == 0) to_of[stage.index] = note.to;
      if (note.marks & OUTPUT) {
        u8* partial = partials + stage.index * PARTIAL_BYTES;
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
          const int unit = i * 32 * READERS + threadIdx.x;
          quantize_unit<WIRE>(total[i], 1.0f, partial, partial + PARTIAL_SCALES_AT, unit, unit < UNITS);
#pragma unroll
          for (int n = 0; n < UNIT; ++n) total[i][n] = 0.0f;
        }
        bulk_fence();
      }
      barrier_arrive_warp(shared_address(made + stage.index));
      stage.advance();
      if (note.to == END) break;
    }
  } else {
    // The flag of the only slot of this block.
    const Turn only(blockIdx.x, rank, num_slots);
    const int source = __shfl_sync(ALL, only.source, 0), token = __shfl_sync(ALL, only.token, 0);
    int* const partial_flag = reinterpret_cast<int*>(__shfl_sync(ALL, reinterpret_cast<u64>(words_of_lane), source)) +
                              PARTIAL_FLAG + (half * PARTIAL_FLAG_TOKENS + token) * WORLD + rank;
    bool flagged = false;  // to be raised once the partial result has landed
    // The last block to come here stores the epoch to `word` of all ranks. Before that all that lane 0 of each block
    // has copied has landed, but for the last copy if `but_last`.
    auto signal = [&](int word, int* so_far, bool but_last) {
      bool last = false;
      if (lane == 0) {
        if (but_last) bulk_await<1>();
        else bulk_await();
        if (PARTIAL_FLAGS && flagged) store_release(partial_flag, epoch);
        last = last_to_arrive(so_far);
      }
      last = __any_sync(ALL, last);
      __syncwarp();
      if (last && lane < WORLD) store_release(words_of_lane + word + rank, epoch);
      __syncwarp();
    };
    // Parts that have been signalled, and those that are to be. A part is signalled when the next partial result is on
    // its way: what came before has landed by then, and readers make others meanwhile.
    int signalled = 0, due = 0;
    auto signal_parts = [&](bool but_last) {
      for (; signalled < due; ++signalled)
        signal(PROGRESS + (half * PROGRESS_PARTS + signalled) * WORLD, counter + 1 + signalled, but_last);
    };
    bool first = true;
    for (;; first = false, stage.advance()) {
      barrier_wait(shared_address(made + stage.index), stage.parity);
      const u64 to = to_of[stage.index];
      __syncwarp();  // all lanes have read it before lane 0 releases the place
      if (to == END) break;
      if (lane == 0 && to == SIGNAL) {
        bulk_await_read<0>();  // the place before is given back below
      } else if (lane == 0) {
        bulk_store(to, partials + stage.index * PARTIAL_BYTES, SENT_BYTES);
        bulk_commit();
        bulk_await_read<1>();
        flagged = num_slots <= gridDim.x;
      }
      if (!first) barrier_arrive_warp(shared_address(taken + (stage.index ^ 1)));
      if (to == SIGNAL) ++due;
      else signal_parts(true);
    }
    signal_parts(false);
    signal(COMBINE_FLAG + half * WORLD, counter, false);
  }
}

extern "C" __global__ void __launch_bounds__(32 * WAITING + 32, 1)
    combine_recv(u16* y_TH, const u16* shared_TH, long long shared_stride, const int* num_parts, int num_tokens,
                 const u64* combine, const u64* signals, const int* epoch_ptr, const int* handle_epoch, int* error,
                 int* latch, int rank, int early_parts, int part_tokens, long long combine_half, long long timeout_ns
#if WAITS
                 ,
                 long long* waits
#endif
    ) {
  using Rows = Ring<PARTIALS, (HAS_SHARED && HIDDEN * 2 > PARTIAL_BYTES) ? HIDDEN * 2 : PARTIAL_BYTES>;
  extern __shared__ __align__(128) u8 shared[];
  __shared__ Note notes[PARTIALS];
  __shared__ u64 barriers[2 * PARTIALS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  Rows rows(shared, notes, barriers);
  const Exchange x{signals, error, latch, rank, timeout_ns};
  if (threadIdx.x == 0) rows.init(WAITING);
  const int* own = x.words(rank);
  const u8* landed = reinterpret_cast<const u8*>(combine[rank]);
  __syncthreads();
  // This rank's own partial results come by its flag like those of peers: `combine_send` need not have ended. The
  // output of a shared expert may come from any kernel before.
  if (HAS_SHARED) asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#if WAITS
  if (blockIdx.x == 0) {
    const int epoch = load_relaxed(handle_epoch);
    return count_combine_waits(x, own, COMBINE_FLAG + (epoch & 1) * WORLD, epoch, waits);
  }
#endif

  if (warp == WAITING) {
    const int epoch = load_relaxed(handle_epoch), half = epoch & 1;
    if (lane == 0 && is_stale(epoch_ptr, epoch)) record_failure(x, STALE_HANDLE, rank, COMBINE_RECV, epoch, 0, 0);
    __syncwarp();
    const int peer = min(lane, WORLD - 1);
    const int* flag = own + COMBINE_FLAG + half * WORLD + peer;
    const int* progress = own + PROGRESS + half * PROGRESS_PARTS * WORLD + peer;
    bool failed = false;
    int arrived = 0;  // parts of the tokens
    auto await_part = [&](int part) {
      // Not all epochs raise these flags: one of long ago may seem to be ahead. Words that nobody has written are those
      // of epoch 0.
      const bool early = part < early_parts && epoch != 0;
      const int* of_part = early ? progress + part * WORLD : flag;
      bool wants = lane < WORLD;
      auto behind = [&] {
        wants = wants && load_acquire(of_part) != epoch && (!early || load_acquire(flag) != epoch);
        return wants;
      };
      failed = await_while(x, own, behind, COMBINE_RECV, epoch);
      // What the flags stand for must be visible to the copy engine, too.
      asm volatile("fence.proxy.async.global;" ::: "memory");
      arrived = part + 1;
    };
    const auto parts_from = [&](int first) {
      const int mine = first + lane * BLOCKS;
      return mine < num_tokens ? num_parts[mine] : 0;
    };
    // The dispatch of these tokens had ended when this kernel began.
    int parts_of_lane = parts_from(BLOCK);
    // Until all partial results of a token are there: by their flags, or by those of all ranks.
    auto await_partials = [&](int token, int parts) {
      const int* of_token = own + PARTIAL_FLAG + (half * PARTIAL_FLAG_TOKENS + token) * WORLD + peer;
      auto behind = [&] {
        // Words that nobody has written are those of epoch 0.
        const u32 partials = __ballot_sync(ALL, lane < WORLD && epoch != 0 && load_acquire(of_token) == epoch);
        if (__popc(partials) == parts) return false;
        return lane < WORLD && load_acquire(flag) != epoch;
      };
      failed = await_while(x, own, behind, COMBINE_RECV, epoch);
      asm volatile("fence.proxy.async.global;" ::: "memory");
    };
    if (!PARTIAL_FLAGS) await_part(0);
    const u8* partials = landed + half * combine_half;
    for (int first = BLOCK; first < num_tokens; first += 32 * BLOCKS) {
      if (first != BLOCK) parts_of_lane = parts_from(first);
      for (int i = 0; i < 32 && first + i * BLOCKS < num_tokens; ++i) {
        const int token = first + i * BLOCKS, part = min(token / part_tokens, early_parts);
        const int all_parts = __shfl_sync(ALL, parts_of_lane, i);
        if (PARTIAL_FLAGS && !failed) await_partials(token, all_parts);
        else if (part >= arrived && !failed) await_part(part);
        const int parts = failed ? 0 : all_parts;
        const u64 number = token;
        const u8* from = partials + static_cast<long long>(token) * PARTS * PARTIAL_BYTES;
        if (HAS_SHARED && !failed)
          rows.push(shared_TH + token * shared_stride, HIDDEN * 2, {number, 0.0f, SHARED | (parts == 0 ? LAST : 0)});
        for (int i = 0; i < parts; ++i)
          rows.push(from + i * PARTIAL_BYTES, SENT_BYTES, {number, 0.0f, PARTIAL | (i + 1 == parts ? LAST : 0)});
        if (failed || (!HAS_SHARED && parts == 0)) rows.push(nullptr, 0, {number, 0.0f, LAST | (failed ? FAILED : 0)});
      }
    }
    // A rank with few tokens also waits for all parts, or learns of a failure.
    if (arrived <= early_parts && !failed) {
      await_part(early_parts);
      // Of a step that fails no token keeps its sum.
      if (PARTIAL_FLAGS && failed)
        for (u64 token = BLOCK; token < num_tokens; token += BLOCKS)
          rows.push(nullptr, 0, {token, 0.0f, LAST | FAILED});
    }
    rows.push(nullptr, 0, {END, 0.0f, 0});
  } else {
    constexpr int EIGHTS = HIDDEN / 8, PER_READER = (EIGHTS + 32 * WAITING - 1) / (32 * WAITING);
    float total[PER_READER][8] = {};
    for (;;) {
      const Note note = rows.front();
      const u8* row = rows.row();
      if (note.marks & PARTIAL) {
        Partial partial[PER_READER];
#pragma unroll
        for (int i = 0; i < PER_READER; ++i) partial[i].load(row, inside(i * 32 * WAITING + threadIdx.x, EIGHTS));
#pragma unroll
        for (int i = 0; i < PER_READER; ++i) partial[i].add_to(total[i]);
      } else if (HAS_SHARED && note.marks & SHARED) {
#pragma unroll
        for (int i = 0; i < PER_READER; ++i) {
          const uint4 raw = reinterpret_cast<const uint4*>(row)[inside(i * 32 * WAITING + threadIdx.x, EIGHTS)];
          const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
          for (int n = 0; n < 8; ++n) total[i][n] = bf16_value(words[n / 2] >> 16 * (n % 2) & 0xFFFF);
        }
      }
      rows.pop();
      if (note.marks == 0) break;
      if (!(note.marks & LAST)) continue;
#pragma unroll
      for (int i = 0; i < PER_READER; ++i) {
        const int unit = i * 32 * WAITING + threadIdx.x;
        uint4 words = bf16_words(total[i]);
        if (note.marks & FAILED) words = make_uint4(0x7FC07FC0u, 0x7FC07FC0u, 0x7FC07FC0u, 0x7FC07FC0u);
        if (unit < EIGHTS) reinterpret_cast<uint4*>(y_TH)[static_cast<long long>(note.to) * EIGHTS + unit] = words;
#pragma unroll
        for (int n = 0; n < 8; ++n) total[i][n] = 0.0f;
      }
    }
  }
  // So that a kernel that waits for this one also waits for `combine_send`.
  if (!HAS_SHARED) asm volatile("griddepcontrol.wait;" ::: "memory");
}
