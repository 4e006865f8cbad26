// Combine of few tokens of a rank alone, in one launch: weights and sums the rows of each token, as `combine_send` and
// `combine_recv` do for ranks that wait for each other. Nothing travels, so nothing is awaited; a sum is rounded to the
// wire format all the same.
//
// A task is a slice of a token. A thread sums one unit of it, over the rows in their order. If `settled`, what the
// dispatch wrote is there when this kernel begins, and is read while the kernel that writes the rows still runs.
//
// Macros: those of signalling.cuh with WORLD 1, HIDDEN, WIRE (FormatCode), K, THREADS, OUTPUT_BF16, HAS_SHARED,
// COMBINE_FLAG, RECORD_BYTES, WEIGHTS_AT, STALE_HANDLE (ErrorCode), COMBINE_SEND (Phase).

// Of a slice: its numbers are one byte each where they have scales.
#define PARTIAL_SCALES_AT (16 * THREADS)

#include "signalling.cuh"
#include "partial.cuh"
#include "expert_output.cuh"

static_assert(WORLD == 1, "WORLD: this kernel is for a rank without peers");

constexpr int UNIT = unit_numbers(WIRE), UNITS = HIDDEN / UNIT, SLICES = (UNITS + THREADS - 1) / THREADS;
constexpr int OUTPUT_BYTES = OUTPUT_BF16 ? 2 : 4;
constexpr int LOADS = UNIT * OUTPUT_BYTES / 16;
constexpr int AT_ONCE = LOADS > 2 ? 4 : 8;  // rows whose loads are in flight together
constexpr int EIGHTS = UNIT / 8;
static_assert(THREADS % 32 == 0 && UNIT * THREADS % 128 == 0, "THREADS: a block of scales is in one slice");
static_assert(HIDDEN % UNIT == 0, "HIDDEN: a thread sums whole units");
static_assert(K >= 1 && K <= 32, "K: a lane of a warp has an entry of a token's routing");

extern "C" __global__ void __launch_bounds__(THREADS)
    one_rank_combine(u16* y_TH, const u16* shared_TH, long long shared_stride, const u8* output, long long row_bytes,
                     const int* positions, int num_tokens, const u64* landing, const u64* signals, const int* epoch_ptr,
                     const int* handle_epoch, int* error, int* latch, long long landing_half, int settled) {
  __shared__ __align__(16) u8 partial[WIRE_BF16 ? 16 : PARTIAL_SCALES_AT + THREADS];
  const int lane = threadIdx.x & 31;
  const Exchange x{signals, error, latch, 0, 0};
  // Tables that never change are read while the kernel before still runs.
  int* const own = x.words(0);
  const u8* const landed = reinterpret_cast<const u8*>(landing[0]);
  int epoch, last_epoch, position = -1;
  bool failed;
  float weights[2] = {};  // of both halves: which of them is meant is not known yet
  // L1 could have what was there in an earlier step.
  const auto load_routing = [&](int token) {
    if (lane >= K) return;
    const u8* weight = landed + static_cast<long long>(token) * RECORD_BYTES + WEIGHTS_AT + 4 * lane;
    position = __ldcg(positions + token * K + lane);
    weights[0] = __ldcg(reinterpret_cast<const float*>(weight));
    weights[1] = __ldcg(reinterpret_cast<const float*>(weight + landing_half));
  };
  const auto load_step = [&] {
    epoch = load_relaxed(handle_epoch), last_epoch = load_relaxed(epoch_ptr);
    failed = x.failed();
    if (blockIdx.x < num_tokens * SLICES) load_routing(blockIdx.x / SLICES);
  };
  if (settled) load_step();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  if (!settled) load_step();
  for (int task = blockIdx.x; task < num_tokens * SLICES; task += gridDim.x) {
    const int token = task / SLICES, unit = task % SLICES * THREADS + threadIdx.x;
    if (task != blockIdx.x) load_routing(token);
    float base[UNIT] = {};
    if (HAS_SHARED) {
      const uint4* row = reinterpret_cast<const uint4*>(shared_TH + token * shared_stride);
#pragma unroll
      for (int i = 0; i < EIGHTS; ++i) {
        const uint4 raw = row[inside(unit, UNITS) * EIGHTS + i];
        const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int n = 0; n < 8; ++n) base[8 * i + n] = bf16_value(words[n / 2] >> 16 * (n % 2) & 0xFFFF);
      }
    }
    const float weight = epoch & 1 ? weights[1] : weights[0];
    // A stale handle's slots hold another step's weights.
    failed |= ahead(last_epoch, epoch) >= 2;
    const u32 present = failed ? 0 : __ballot_sync(ALL, position >= 0);
    float total[UNIT] = {};
    for (u32 left = present; left;) {
      uint4 raw[AT_ONCE][LOADS];
      float weight_of[AT_ONCE];
      bool there[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i, left &= left - 1) {
        const int k = left ? __ffs(left) - 1 : 0;
        there[i] = left != 0;
        weight_of[i] = __shfl_sync(ALL, weight, k);
        const long long at = __shfl_sync(ALL, position, k);
        if (!there[i]) continue;
#pragma unroll
        for (int j = 0; j < LOADS; ++j)
          raw[i][j] = reinterpret_cast<const uint4*>(output + at * row_bytes)[inside(unit, UNITS) * LOADS + j];
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        if (there[i])
#pragma unroll
          for (int n = 0; n < UNIT; ++n)
            total[n] = __fadd_rn(total[n], __fmul_rn(weight_of[i], output_number<OUTPUT_BYTES>(raw[i], n)));
    }
    if (present) {
#if WIRE_BF16
      Partial sent;
      sent.raw = bf16_words(total);
      sent.add_to(base);
#else
      quantize_unit<WIRE>(total, 1.0f, partial, partial + PARTIAL_SCALES_AT, threadIdx.x, true);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < EIGHTS; ++i) {
        Partial sent;
        sent.load(partial, threadIdx.x * EIGHTS + i);
        float eight[8];
#pragma unroll
        for (int n = 0; n < 8; ++n) eight[n] = base[8 * i + n];
        sent.add_to(eight);
#pragma unroll
        for (int n = 0; n < 8; ++n) base[8 * i + n] = eight[n];
      }
      __syncwarp();
#endif
    }
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
      float eight[8];
#pragma unroll
      for (int n = 0; n < 8; ++n) eight[n] = base[8 * i + n];
      uint4 words = bf16_words(eight);
      if (failed) words = make_uint4(0x7FC07FC0u, 0x7FC07FC0u, 0x7FC07FC0u, 0x7FC07FC0u);
      if (unit < UNITS)
        reinterpret_cast<uint4*>(y_TH)[(static_cast<long long>(token) * UNITS + unit) * EIGHTS + i] = words;
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    if (ahead(last_epoch, epoch) >= 2) record_failure(x, STALE_HANDLE, 0, COMBINE_SEND, epoch, 0, 0);
    store_relaxed(own + COMBINE_FLAG + (epoch & 1), epoch);
  }
}
