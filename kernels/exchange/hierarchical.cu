// The exchange between hosts: what happens before and after that of one host. `hierarchical.py` says what each part
// does and has the layout of chunks; `dispatch_send.cu` packs records into them, with hosts for ranks.
//
// Macros: those of signalling.cuh, HOSTS (at most 32), HOST (this one), ERROR_WORDS and COUNT (of a header, which a
// chunk of records begins with), SUM_HEADER_AT (of a chunk of sums), FLAGS_AT and RECORDS_AT (of one of records), K,
// RECORD_BYTES, IDS_AT, SOURCE_AT, WEIGHTS_AT, WARPS (of a block of `forward_send`), SLOTS (of a host), READY,
// COMBINE_FLAG, DISPATCH_FLAG, TOKEN_COUNT, ROUTING, CAPACITY and MISMATCH (ErrorCode), DISPATCH_SEND (Phase), HIDDEN
// and SUM_BYTES (of a sum), WIRE and PARTIAL_SCALES_AT (of partial.cuh).

#include "signalling.cuh"
#include "partial.cuh"

static_assert(HOSTS >= 1 && HOSTS <= 32, "HOSTS: a lane of a warp stands for a host, so there are 1 to 32");
static_assert(HOST >= 0 && HOST < HOSTS, "HOST: one of HOSTS");
static_assert(WARPS >= 1 && WARPS <= 32, "WARPS: of a block of forward_send");
static_assert(K >= 1 && K <= 32, "K: a lane of a warp has an entry of a token's routing");
static_assert(HIDDEN % 16 == 0, "HIDDEN: threads sum units of 8 or 16 numbers");
static_assert(RECORD_BYTES % 16 == 0 && SUM_BYTES % 16 == 0, "RECORD_BYTES, SUM_BYTES: copied 16 bytes at a time");

__device__ __noinline__ void adopt_header(const Exchange x, const int* header) {
  record_failure_of(x, header[0], header[1], header[2], header[3], header[4], header[6], header[5]);
}

constexpr u32 OTHER_HOSTS = (HOSTS < 32 ? (1u << HOSTS % 32) - 1 : ALL) & ~(1u << HOST);

// Records the failure that the header of a host in `hosts`, a mask, tells of, if one does; returns whether this rank
// has failed. For a whole warp.
__device__ __forceinline__ bool adopt_headers(const Exchange& x, const u64* chunks, int header_at, u32 hosts) {
  const int lane = threadIdx.x & 31;
  const int* header = reinterpret_cast<const int*>(chunks[min(lane, HOSTS - 1)] + header_at);
  const u32 told = __ballot_sync(ALL, (hosts >> lane & 1) && header[0] != 0);
  const bool failed = x.failed();
  if (told && lane == __ffs(told) - 1) adopt_header(x, header);
  __syncwarp();
  return __any_sync(ALL, failed || told != 0) != 0;
}

// Rank `number` of this host as headers name it.
__device__ __forceinline__ int named(int number) { return number < WORLD ? WORLD + HOST * WORLD + number : number; }

// Writes into the header of each chunk whether this rank has failed. With `packed`, what `dispatch_send` recorded in it
// becomes a failure of this rank, and with `counts` that there are more tokens for a host than slots. One warp.
extern "C" __global__ void __launch_bounds__(32)
    host_headers(const u64* chunks, int header_at, const int* packed, const int* pack_latch, const int* counts,
                 int num_tokens, int count_tag, const int* pack_epoch, const u64* signals, int* error, int* latch,
                 int rank, long long timeout_ns) {
  const Exchange x{signals, error, latch, rank, timeout_ns};
  const int lane = threadIdx.x & 31;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  if (packed != nullptr && lane == 0 && *pack_latch != 0)
    record_failure(x, ROUTING, rank, DISPATCH_SEND, packed[3], packed[4], packed[6]);
  __syncwarp();
  if (counts != nullptr) {
    const int most = __reduce_max_sync(ALL, lane < HOSTS ? counts[lane] : 0);
    if (lane == 0 && most >= SLOTS) record_failure(x, CAPACITY, rank, DISPATCH_SEND, *pack_epoch, most, SLOTS - 1);
    __syncwarp();
  }
  adopt_aborts(x);
  const bool failed = __any_sync(ALL, x.failed()) != 0;
  if (failed) await_abort_sent(x);
  int word = lane < ERROR_WORDS && failed ? load_relaxed(error + lane) : 0;
  if (failed && (lane == 1 || lane == 5)) word = named(word);
  if (lane == COUNT) word = packed == nullptr ? 0 : num_tokens + tag_of(count_tag, load_relaxed(pack_epoch));
  for (int host = 0; host < HOSTS; ++host)
    if (lane < ERROR_WORDS) reinterpret_cast<int*>(chunks[host] + header_at)[lane] = word;
}

constexpr int SENT_BYTES = (WEIGHTS_AT + 4 * K + 15) / 16 * 16;

__device__ __noinline__ void record_mismatch(const Exchange x, int host, int epoch, int count, int tag) {
  record_failure_of(x, MISMATCH, named(0) - HOST * WORLD + host * WORLD + x.rank, DISPATCH_SEND, epoch,
                    exchange_of(count), exchange_of(tag), x.rank);
}

// Copies the record of each token in slots `first` to `end` of its chunk to the ranks of this host that hold its
// experts: of this rank's own tokens, which come first, or of those of all other hosts. The last slots raise flags. A
// warp takes a token.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    forward_send(const u64* chunks, int own_tokens, int first, int end, int num_tokens, int count_tag,
                 const int* starts, int first_expert, int num_experts, const u64* landing, const u64* token_flags,
                 const u64* signals, int* epoch_ptr, int* handle_epoch, int* num_parts, int* error, int* latch,
                 int* counter, int rank, long long landing_half, long long token_flags_half, long long timeout_ns) {
  extern __shared__ __align__(128) u8 records[];  // [WARPS][RECORD_BYTES]
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, peer = min(lane, WORLD - 1);
  const Exchange x{signals, error, latch, rank, timeout_ns};
  const int* own = x.words(rank);
  int* const words_of_lane = x.words(peer);
  const u64 landing_of_lane = landing[peer], token_flags_of_lane = token_flags[peer];
  const int end_of_lane = starts[peer + 1];
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int epoch = load_relaxed(epoch_ptr) + 1, half = epoch & 1;
  if (warp == 0) {
    if (blockIdx.x == 0) {
      // Arrival may start before this kernel has ended and must know the epoch that it waits for.
      if (lane == 0) {
        store_relaxed(handle_epoch, epoch);
        __threadfence();
      }
      if (own_tokens && lane < WORLD) store_release(words_of_lane + READY + rank, epoch);
      __syncwarp();
    }
    asm volatile("griddepcontrol.launch_dependents;");
  }
  const u32 hosts = own_tokens ? 1u << HOST : OTHER_HOSTS;
  bool failed = adopt_headers(x, chunks, 0, hosts);
  const int tag = tag_of(count_tag, epoch);
  const int count = reinterpret_cast<const int*>(chunks[min(lane, HOSTS - 1)])[COUNT];
  const int tokens = without_sign(count) - tag;  // of each lane's host; slots past them hold anything
  const u32 wrong = __ballot_sync(ALL, (hosts >> lane & 1) && (tokens < 0 || tokens > num_tokens));
  if (!failed && wrong) {
    if (lane == __ffs(wrong) - 1) record_mismatch(x, lane, epoch, count, tag);
    __syncwarp();
    failed = true;
  }
  if (own_tokens) {
    failed |= await_free(x, own, lane < WORLD, own + READY + peer, own + COMBINE_FLAG + half * WORLD + peer,
                         DISPATCH_SEND, epoch);
    failed = __any_sync(ALL, failed) != 0;
  }
  // Flags raised without data must come after the abort messages.
  if (failed) await_abort_sent(x);
  const bool last = !own_tokens && end == SLOTS;
  if (!failed && last && blockIdx.x == 0 && warp == 0 && lane < WORLD)
    store_relaxed(words_of_lane + half * WORLD + rank + TOKEN_COUNT, HOSTS * SLOTS + tag);

  u8* record = records + warp * RECORD_BYTES;
  const int length = end - first, turns = own_tokens ? length : (HOSTS - 1) * length;
  for (int turn = blockIdx.x * WARPS + warp; turn < turns; turn += gridDim.x * WARPS) {
    const int other = turn / length, host = own_tokens ? HOST : other + (other >= HOST), token = first + turn % length;
    const int slot = host * SLOTS + token;
    const u64 chunk = chunks[host];
    const u8* from = reinterpret_cast<const u8*>(chunk + RECORDS_AT) + static_cast<long long>(token) * RECORD_BYTES;
    const int most = min(__shfl_sync(ALL, tokens, host), SLOTS - 1);
    const bool came = token < most && reinterpret_cast<const int*>(chunk + FLAGS_AT)[token] == epoch;
    int expert = -1;
    if (came && lane < K) {
      const int id = static_cast<int>(reinterpret_cast<const u16*>(from + IDS_AT)[lane]) - first_expert;
      if (id >= 0 && id < num_experts) expert = id;
    }
    const int owner = owner_of(expert, end_of_lane);
    const u32 targets = __reduce_or_sync(ALL, expert >= 0 ? 1u << owner : 0u);
    if (lane == 0) num_parts[slot] = __popc(targets);
    if (failed || targets == 0) continue;
    bulk_await_read<0>();
    __syncwarp();
    for (int i = lane; i < SENT_BYTES / 16; i += 32)
      reinterpret_cast<uint4*>(record)[i] = reinterpret_cast<const uint4*>(from)[i];
    __syncwarp();
    if (lane < K) reinterpret_cast<u16*>(record + IDS_AT)[lane] = static_cast<u16>(expert);
    if (lane == 0) *reinterpret_cast<int*>(record + SOURCE_AT) = slot;
    bulk_fence();
    __syncwarp();
    const long long place = static_cast<long long>(rank) * (HOSTS * SLOTS) + slot;
    const u64 to = landing_of_lane + half * landing_half + place * RECORD_BYTES;
    // Says only that the slot is used: the flag comes behind all records.
    if (lane < WORLD && (targets >> lane & 1))
      store_relaxed(reinterpret_cast<int*>(token_flags_of_lane + half * token_flags_half) + place, epoch);
    for (u32 left = targets; left; left &= left - 1) {
      const u64 at = __shfl_sync(ALL, to, __ffs(left) - 1);
      if (lane == 0) bulk_store(at, record, SENT_BYTES);
    }
    bulk_commit();
  }
  bulk_await();
  __syncwarp();
  fence_system();
  __syncthreads();
  if (last && warp == 0) {
    bool final_block = false;
    if (lane == 0) final_block = last_to_arrive(counter);
    final_block = __any_sync(ALL, final_block);
    __syncwarp();
    if (final_block) {
      if (lane == 0) *epoch_ptr = epoch;
      if (lane < WORLD) store_release(words_of_lane + half * WORLD + rank + DISPATCH_FLAG, epoch);
    }
  }
}

constexpr int EIGHTS = HIDDEN / 8;

// Adds the sums of all hosts, ascending, to `shared`, for tokens `first` to `end`. Where slots of chunks are not
// tokens, `slots` has the one of each token on each host, -1 for none. The launch of the last ones reads what headers
// tell, and after a failure writes NaN for all tokens. A block takes a token.
extern "C" __global__ void __launch_bounds__(256)
    host_total(const u64* chunks, const u16* shared, long long shared_stride, const int* slots, int max_tokens, u16* y,
               int first, int end, int last, const u64* signals, int* error, int* latch, int rank,
               long long timeout_ns) {
  const Exchange x{signals, error, latch, rank, timeout_ns};
  __shared__ int any_failed;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  if (threadIdx.x < 32) {
    const bool failed = last && adopt_headers(x, chunks, SUM_HEADER_AT, OTHER_HOSTS);
    if (threadIdx.x == 0) any_failed = failed;
  }
  __syncthreads();
  const bool failed = any_failed;
  for (int token = (failed ? 0 : first) + blockIdx.x; token < end; token += gridDim.x) {
    int slot[HOSTS];
#pragma unroll
    for (int host = 0; host < HOSTS; ++host) slot[host] = slots == nullptr ? token : slots[host * max_tokens + token];
    for (int unit = threadIdx.x; unit < EIGHTS; unit += 256) {
      Partial partials[HOSTS];
#pragma unroll
      for (int host = 0; host < HOSTS; ++host) {
        partials[host] = Partial{};
        if (slot[host] >= 0)
          partials[host].load(
              reinterpret_cast<const u8*>(chunks[host]) + static_cast<long long>(slot[host]) * SUM_BYTES, unit);
      }
      float total[8];
      uint4 added = make_uint4(0, 0, 0, 0);
      if (shared != nullptr) added = reinterpret_cast<const uint4*>(shared + token * shared_stride)[unit];
      const u32 words[4] = {added.x, added.y, added.z, added.w};
#pragma unroll
      for (int n = 0; n < 8; ++n) total[n] = bf16_value(words[n / 2] >> 16 * (n % 2) & 0xFFFF);
#pragma unroll
      for (int host = 0; host < HOSTS; ++host) partials[host].add_to(total);
      uint4 sums = bf16_words(total);
      if (failed) sums = make_uint4(0x7FC07FC0u, 0x7FC07FC0u, 0x7FC07FC0u, 0x7FC07FC0u);
      reinterpret_cast<uint4*>(y)[static_cast<long long>(token) * EIGHTS + unit] = sums;
    }
  }
}

#if !WIRE_BF16
// Quantizes sums, bf16 `[num_rows][HIDDEN]`, into rows of a chunk. A block takes a row.
extern "C" __global__ void __launch_bounds__(256) host_quantize(const u16* sums, u8* rows, int num_rows) {
  constexpr int UNITS = HIDDEN / 16;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  for (int row = blockIdx.x; row < num_rows; row += gridDim.x) {
    u8* quants = rows + static_cast<long long>(row) * SUM_BYTES;
    for (int first = 0; first < UNITS; first += 256) {
      const int unit = first + threadIdx.x;
      const uint4* from =
          reinterpret_cast<const uint4*>(sums + static_cast<long long>(row) * HIDDEN) + 2 * min(unit, UNITS - 1);
      const uint4 low = from[0], high = from[1];
      const u32 pairs[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      float x[16];
#pragma unroll
      for (int n = 0; n < 16; ++n) x[n] = bf16_value(pairs[n / 2] >> 16 * (n % 2) & 0xFFFF);
      quantize_unit<WIRE>(x, 1.0f, quants, quants + PARTIAL_SCALES_AT, unit, unit < UNITS);
    }
  }
}
#endif
