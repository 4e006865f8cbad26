// Gathers the rows of a grouped GEMM and dequantizes them once to bf16, in the order in which wgmma reads them.
//
// The result is [K / 64][blocks of 8 tokens][8 pieces of columns][8 tokens][8 values], so that 64 columns of a tile are
// contiguous. Within the 64, columns are in the order of dequant_layout.py. Columns past K are zeros. NVFP4 values are
// stored times 2^100.
//
// A group starts at block (group_offsets[g] + 7 * g) / 8. A warp handles a block of 8 tokens and 64
// columns, so that it stores whole lines: lane = row * 4 + t has the columns 16 * t .. 16 * t + 15. Thread blocks loop
// over blocks of 8 tokens up to the last token, because a capacity is a worst case and most of it may be empty.
//
// Two kernels dequantize many tokens. The first runs on all SMs. The second does the rest on few SMs, OVERLAPPED with
// the GEMM that reads them. The GEMM waits on `counters`: the first counts the tiles that the GEMM's blocks
// have taken; the others count, for each block of 8 tokens from `begin` on, the warps that have dequantized their part
// of it.
//
// Macros:
//   OVERLAPPED, TEAM (warps of a thread block that share a block of tokens), THREADS of a block,
//   MIN_BLOCKS (blocks that must fit on an SM, which limits registers; 0 leaves registers to the compiler), AHEAD
//   (pieces of a row that a thread loads before it dequantizes the first), FMT (FormatCode), MAX_GROUPS, SCALE_BLOCK,
//   PACKED (ScaleLayout of the scales, else swizzled), SCALES_IN_RECORD (scales lie with their rows, in neither
//   layout).
// `scale_ld` is the leading dimension of PACKED scales, or the bytes from one row's scales in a record to the next.

#include "bulk_store.cuh"
#include "token_piece.cuh"

constexpr int TEAMS = THREADS / 32 / TEAM;
constexpr int BLOCK_BYTES = 1024;  // of 8 tokens and 64 columns

static_assert(TEAM >= 1 && THREADS % (32 * TEAM) == 0 && THREADS <= 1024, "TEAM: a block is whole teams of warps");
static_assert(AHEAD >= 1 && AHEAD <= 32, "AHEAD: a lane stores each block of the copy engine");
static_assert(MAX_GROUPS >= 1, "MAX_GROUPS: a table has a group at least");

// AHEAD blocks of a warp in shared memory, stored by the copy engine, and the counter to increment when they are
// stored.
struct Outbox {
  u8* blocks;
  u32* pending = nullptr;  // of a block of tokens whose last parts the copy engine is still storing

  // Waits until the blocks may be filled again.
  __device__ __forceinline__ void empty() {
    if (pending) return count();
    bulk_await_read<0>();
    __syncwarp();
  }

  __device__ __forceinline__ void count() {
    bulk_await();
    __syncwarp();
    if (pending && (threadIdx.x & 31) == 0) {
      asm volatile("fence.acq_rel.gpu;" ::: "memory");
      atomicAdd(pending, 1);
    }
    pending = nullptr;
  }

  __device__ __forceinline__ void fill(int number, const u32 (&pairs)[8]) {
    const u32 to = shared_address(blocks) + number * BLOCK_BYTES + (threadIdx.x & 31) * 16;
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to + j * 128),
                   "r"(pairs[j]), "r"(pairs[j + 1]), "r"(pairs[j + 2]), "r"(pairs[j + 3])
                   : "memory");
    }
  }

  // Starts the stores of the first `blocks_sent` blocks, `stride` bytes apart.
  __device__ __forceinline__ void send(u8* to, long long stride, int blocks_sent) {
    bulk_fence();
    __syncwarp();
    const int i = threadIdx.x & 31;
    if (i < min(blocks_sent, AHEAD))
      bulk_store(reinterpret_cast<u64>(to + i * stride), blocks + i * BLOCK_BYTES, BLOCK_BYTES);
    bulk_commit();
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    dequant_tokens(const u8* rows, const u8* scales, const int* row_index, const int* group_offsets,
                   const int* group_scale_offsets, const int* expert_ids, const int* num_active, u8* out,
                   int num_groups, int num_experts, int capacity, int columns, int units, int token_blocks,
                   int scale_ld, long long row_bytes, int begin, int end, u32* counters) {
  extern __shared__ __align__(128) u8 memory[];
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  if (num_active) num_groups = min(num_groups, max(*num_active, 0));
  // The shuffle makes the value warp-uniform for the compiler, which then computes shared values once.
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), lane = threadIdx.x & 31, t = lane & 3;
  __shared__ int offsets[MAX_GROUPS + 1], experts[MAX_GROUPS], scale_offsets[GROUP_SCALES ? MAX_GROUPS : 1];
  for (int g = threadIdx.x; g <= num_groups; g += blockDim.x) {
    offsets[g] = min(max(group_offsets[g], 0), capacity);
    if (g == num_groups) continue;
    experts[g] = expert_ids[g];
    if (GROUP_SCALES) scale_offsets[g] = group_scale_offsets[g];
  }
  __syncthreads();
  if (num_groups == 0) return;
  auto first_block = [&](int group) { return (offsets[group] + 7 * group) / 8; };
  const int past = first_block(num_groups);
  if (!OVERLAPPED && counters) {
    const int thread = (blockIdx.y * gridDim.x + blockIdx.x) * THREADS + threadIdx.x;
    for (int i = thread; i <= max(past - end, 0); i += gridDim.x * gridDim.y * THREADS) counters[i] = 0;
  }
  Outbox outbox = {OVERLAPPED ? memory + warp * AHEAD * BLOCK_BYTES : nullptr};
  const long long unit_stride = static_cast<long long>(token_blocks) * BLOCK_BYTES;
  int group = 0;
  for (int number = begin + blockIdx.x * TEAMS + warp / TEAM; number < min(past, end); number += gridDim.x * TEAMS) {
    // Find the last group that starts at or before the block. Of groups with the same first block, the last is not
    // empty.
    for (int high = group + 1 < num_groups && first_block(group + 1) <= number ? num_groups : 0; high - group > 1;) {
      const int middle = (group + high) / 2;
      if (first_block(middle) <= number) group = middle;
      else high = middle;
    }
    const int start = offsets[group], last = offsets[group + 1] - start - 1;
    int local = (number - first_block(group)) * 8 + lane / 4;
    // Rows of a skipped group are not read.
    if (static_cast<u32>(experts[group]) >= static_cast<u32>(num_experts)) continue;
    if (local > last) {
      if (!OVERLAPPED || last < 0) continue;
      local = last;  // nobody reads what the lane stores there
    }
    const long long source = row_index ? row_index[start + local] : start + local;
    const RowPlace place =
        place_of_row(source, start, local, GROUP_SCALES ? scale_offsets[group] : 0, scale_ld, row_bytes, columns);
    long long row = place.numbers + t * 16 * NUMBER_BITS / 8, row_scales = place.scales;
    const int of_four = place.of_four;
    // Keeps both offsets in registers; otherwise the compiler recomputes them for each piece.
    asm("" : "+l"(row), "+l"(row_scales));
    u8* block = out + static_cast<long long>(number) * BLOCK_BYTES;
    // A warp handles neighbouring units, so that it reads whole memory transactions of a row. NVFP4 lost by it when all
    // SMs dequantize.
    constexpr bool NEIGHBOURS = FMT == MXFP8 || FMT == FP8_BLOCK || OVERLAPPED;
    const int warps = gridDim.y * TEAM, step = NEIGHBOURS ? 1 : warps, distance = NEIGHBOURS ? AHEAD : 1;
    int first_unit = (blockIdx.y * TEAM + warp % TEAM) * distance;
    for (; first_unit < units; first_unit += warps * AHEAD) {
      Piece pieces[AHEAD];
      auto load = [&](int i) {
        const u32 unit = first_unit + i * step, v = (unit * 64 + t * 16) / SCALE_BLOCK;
        pieces[i].load(rows + row + unit * (8 * NUMBER_BITS));
        pieces[i].load_scale(scales + row_scales, of_four, v);
      };
      if (((first_unit + (AHEAD - 1) * step) + 1) * 64 <= columns) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) load(i);
      } else {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
          if ((first_unit + i * step) * 64 + t * 16 < columns) load(i);
        }
      }
      if (OVERLAPPED) outbox.empty();
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int unit = first_unit + i * step;
        if (unit >= units) break;
        u32 pairs[8];
        pieces[i].dequantize(pairs);
        if (OVERLAPPED) {
          outbox.fill(i, pairs);
        } else {
          u8* to = block + unit * unit_stride + lane * 4;
#pragma unroll
          for (int j = 0; j < 8; ++j) *reinterpret_cast<u32*>(to + j * 128) = pairs[j];
        }
      }
      if (OVERLAPPED)
        outbox.send(block + first_unit * unit_stride, step * unit_stride, (units - first_unit + step - 1) / step);
    }
    if (OVERLAPPED) {
      // A warp without a part of this block counts it when its previous block is stored.
      if (outbox.pending) outbox.count();
      outbox.pending = counters + 1 + number - begin;
    }
  }
  if (OVERLAPPED) outbox.count();
}
