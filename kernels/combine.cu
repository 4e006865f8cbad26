// Combine: reduces the experts of a rank for each token, sends one partial result home, and sums over ranks.
//
// The sibling of `kernels/combine.py` for Hopper, over the same memory and with the same order of sums. A team of threads
// takes a slot: its partial result is made in shared memory and sent whole by the copy engine.
//
// Macros: those of signalling.cuh, HIDDEN, WIRE (FormatCode), PARTS, PARTIAL_BYTES, PARTIAL_SCALES_AT, COMBINE_FLAG,
// TEAM (threads), TEAMS (of a block), WAITING (threads of a block of combine_wait), K, OUTPUT_BF16, RECORD_BYTES, IDS_AT,
// WEIGHTS_AT, HAS_SHARED, STALE_HANDLE (ErrorCode), COMBINE_SEND and COMBINE_WAIT (Phase).

#include "signalling.cuh"
#include "quantize.cuh"

#define WIRE_BF16 (WIRE == 0)

constexpr int UNIT = unit_numbers(WIRE), UNITS = HIDDEN / UNIT, PER_THREAD = (UNITS + TEAM - 1) / TEAM;
constexpr int SCALE_BYTES = WIRE == BF16 ? 0 : WIRE == MXFP8 ? HIDDEN / 32 : HIDDEN / 128 * 4;
constexpr int SENT_BYTES = (PARTIAL_SCALES_AT + SCALE_BYTES + 15) / 16 * 16;
constexpr int STAGES = 2;
constexpr int OUTPUT_BYTES = OUTPUT_BF16 ? 2 : 4;
constexpr int LOADS = UNIT * OUTPUT_BYTES / 16;

// Number `n` of a unit of an expert's row, rounded to bf16.
__device__ __forceinline__ float output_number(const uint4 (&raw)[LOADS], int n) {
  const uint4 four = raw[n * OUTPUT_BYTES / 16];
  const int word = n * OUTPUT_BYTES / 4 % 4;
  const u32 bits = word == 0 ? four.x : word == 1 ? four.y : word == 2 ? four.z : four.w;
  return bf16_value(OUTPUT_BF16 ? bits >> 16 * (n % 2) & 0xFFFF : bf16_bits(__uint_as_float(bits)));
}

extern "C" __global__ void __launch_bounds__(TEAM* TEAMS)
    combine_send(const u8* output, long long row_bytes, const int* positions, const int* starts, const u64* landing,
                 const u64* combine, const u64* signals, const int* epoch_ptr, const int* handle_epoch, int* error,
                 int* latch, int* counter, int rank, int max_tokens, int num_slots, long long landing_half,
                 long long combine_half) {
  extern __shared__ __align__(128) u8 partials[];  // [TEAMS][STAGES][PARTIAL_BYTES]
  const int team = threadIdx.x / TEAM, thread = threadIdx.x % TEAM, warp = thread / 32, lane = threadIdx.x & 31;
  const Exchange x{signals, error, latch, rank, 0};
  // Tables that never change are read while the kernel before still runs.
  int* const words_of_lane = x.words(min(lane, WORLD - 1));
  const u64 combine_of_lane = combine[min(lane, WORLD - 1)];
  const int end_of_lane = starts[min(lane, WORLD - 1) + 1];
  const u8* landed = reinterpret_cast<const u8*>(landing[rank]);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  const int epoch = load_relaxed(handle_epoch), half = epoch & 1;
  // A stale handle's slots hold another step's records: their routing must not be used as addresses.
  const bool stale = ahead(load_relaxed(epoch_ptr), epoch) >= 2;
  if (stale && blockIdx.x == 0 && threadIdx.x == 0)
    record_failure(x, STALE_HANDLE, rank, COMBINE_SEND, epoch, 0, 0);
  const u8* records = landed + half * landing_half;

  int stage = 0;
  for (int slot = blockIdx.x * TEAMS + team; slot < num_slots && !stale; slot += gridDim.x * TEAMS) {
    const int* position = positions + static_cast<long long>(slot) * K;
    u32 present = 0;
#pragma unroll
    for (int k = 0; k < K; ++k) present |= position[k] >= 0 ? 1u << k : 0u;
    if (present == 0) continue;
    const u8* record = records + static_cast<long long>(slot) * RECORD_BYTES;
    const float* weights = reinterpret_cast<const float*>(record + WEIGHTS_AT);
    const int id = warp == 0 && lane < K ? reinterpret_cast<const u16*>(record + IDS_AT)[lane] : 0xFFFF;
    float total[PER_THREAD][UNIT] = {};
    for (; present; present &= present - 1) {
      const int k = __ffs(present) - 1;
      const float weight = weights[k];
      const uint4* row = reinterpret_cast<const uint4*>(output + position[k] * row_bytes);
      uint4 raw[PER_THREAD][LOADS];
#pragma unroll
      for (int i = 0; i < PER_THREAD; ++i)
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
          const int unit = i * TEAM + thread;
          raw[i][j] = unit < UNITS ? row[unit * LOADS + j] : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
      for (int i = 0; i < PER_THREAD; ++i)
#pragma unroll
        for (int n = 0; n < UNIT; ++n)
          total[i][n] = __fadd_rn(total[i][n], __fmul_rn(weight, output_number(raw[i], n)));
    }
    u8* partial = partials + (team * STAGES + stage) * PARTIAL_BYTES;
    if (thread == 0) bulk_await_read<STAGES - 1>();
    team_barrier(team, TEAM);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const int unit = i * TEAM + thread;
      quantize_unit<WIRE>(total[i], 1.0f, partial, partial + PARTIAL_SCALES_AT, unit, unit < UNITS);
    }
    bulk_fence();
    team_barrier(team, TEAM);
    if (warp == 0) {
      const int owner = owner_of(id, end_of_lane);
      const u32 ranks = __reduce_or_sync(ALL, id != 0xFFFF ? 1u << owner : 0u);
      const int part = __popc(ranks & ((1u << rank) - 1)), source = slot / max_tokens, token = slot % max_tokens;
      const u64 region = __shfl_sync(ALL, combine_of_lane, source) + half * combine_half;
      if (lane == 0) {
        bulk_store(region + (static_cast<long long>(token) * PARTS + part) * PARTIAL_BYTES, partial, SENT_BYTES);
        bulk_commit();
      }
    }
    stage ^= 1;
  }

  if (thread == 0) {
    bulk_await();
    fence_system();
  }
  if (TEAMS > 1) __syncthreads();
  if (threadIdx.x < 32) {
    __syncwarp();
    bool last = false;
    if (lane == 0) last = last_to_arrive(counter);
    last = __any_sync(ALL, last);
    __syncwarp();
    if (last && lane < WORLD) store_release(words_of_lane + COMBINE_FLAG + half * WORLD + rank, epoch);
  }
}

// 8 numbers of a partial result as they came, and their scale.
struct Partial {
#if WIRE_BF16
  uint4 raw;
#else
  uint2 raw;
  u32 scale;
#endif
  __device__ __forceinline__ void load(const u8* partial, int unit) {
    raw = __ldcg(reinterpret_cast<const decltype(raw)*>(partial) + unit);
#if !WIRE_BF16
    const u8* scales = partial + PARTIAL_SCALES_AT;
    scale = WIRE == FP8_BLOCK ? __ldcg(reinterpret_cast<const u32*>(scales) + unit / 16) : __ldcg(scales + unit / 4);
#endif
  }

  __device__ __forceinline__ void add_to(float (&total)[8]) const {
#if WIRE_BF16
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int n = 0; n < 8; ++n) total[n] = __fadd_rn(total[n], bf16_value(words[n / 2] >> 16 * (n % 2) & 0xFFFF));
#else
    const u32 bits = WIRE == FP8_BLOCK ? scale : scale == 0 ? 0x400000u : scale == 255 ? NOT_A_NUMBER : scale << 23;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const u32 code = (n < 4 ? raw.x : raw.y) >> 8 * (n % 4) & 0xFF;
      total[n] = __fadd_rn(total[n], __fmul_rn(e4m3_value(code), __uint_as_float(bits)));
    }
#endif
  }
};

extern "C" __global__ void __launch_bounds__(WAITING)
    combine_wait(u16* y_TH, const u16* shared_TH, long long shared_stride, const int* num_parts, int num_tokens,
                 const u64* combine, const u64* signals, const int* epoch_ptr, const int* handle_epoch, int* error,
                 int* latch, int rank, long long combine_half, long long timeout_ns) {
  const Exchange x{signals, error, latch, rank, timeout_ns};
  const int lane = threadIdx.x & 31;
  const int* own = x.words(rank);
  const u8* landed = reinterpret_cast<const u8*>(combine[rank]);
  // What comes from this rank itself comes by its flag, as from any other: `combine_send` need not have ended. What a
  // shared expert gives may be of any kernel before.
  if (HAS_SHARED) asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  const int epoch = load_relaxed(handle_epoch), half = epoch & 1;
  bool failed = false;
  if (threadIdx.x < 32) {
    if (lane == 0 && is_stale(epoch_ptr, epoch))
      record_failure(x, STALE_HANDLE, rank, COMBINE_WAIT, epoch, 0, 0);
    __syncwarp();
    const int* flag = own + COMBINE_FLAG + half * WORLD + min(lane, WORLD - 1);
    failed = await(x, own, lane < WORLD, flag, epoch, flag, epoch, COMBINE_WAIT, epoch);
  }
  failed = __syncthreads_or(failed) != 0;
  const u8* partials = landed + half * combine_half;
  for (int token = blockIdx.x; token < num_tokens; token += gridDim.x) {
    const int parts = failed ? 0 : num_parts[token];
    const u8* first = partials + static_cast<long long>(token) * PARTS * PARTIAL_BYTES;
    for (int unit = threadIdx.x; unit < HIDDEN / 8; unit += WAITING) {
      Partial partial[PARTS];
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
        if (part < parts) partial[part].load(first + part * PARTIAL_BYTES, unit);
      float total[8] = {};
      if constexpr (HAS_SHARED) {
        const uint4 raw = *(reinterpret_cast<const uint4*>(shared_TH + token * shared_stride) + unit);
        const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int n = 0; n < 8; ++n) total[n] = bf16_value(words[n / 2] >> 16 * (n % 2) & 0xFFFF);
      }
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
        if (part < parts) partial[part].add_to(total);
      uint4 words;
      words.x = bf16_bits(total[0]) | bf16_bits(total[1]) << 16, words.y = bf16_bits(total[2]) | bf16_bits(total[3]) << 16;
      words.z = bf16_bits(total[4]) | bf16_bits(total[5]) << 16, words.w = bf16_bits(total[6]) | bf16_bits(total[7]) << 16;
      if (failed) words = make_uint4(0x7FC07FC0u, 0x7FC07FC0u, 0x7FC07FC0u, 0x7FC07FC0u);
      reinterpret_cast<uint4*>(y_TH)[static_cast<long long>(token) * (HIDDEN / 8) + unit] = words;
    }
  }
  // A kernel that waits for this one waits for what came before, too.
  if (!HAS_SHARED) asm volatile("griddepcontrol.wait;" ::: "memory");
}
