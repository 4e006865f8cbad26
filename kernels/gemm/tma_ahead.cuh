// Four-bit weights that become e4m3 in memory, ahead of the tiles that multiply them, for inclusion by tma_gemm.cu.
//
// A strip is what a column tile of a group multiplies: 256 weight rows. Strips have the numbers of their groups, times
// the column tiles, and then of their column tiles. `ring` has room for `slots` of them in e4m3, each block of K as 256
// rows of 128 bytes. A warpgroup of each block does nothing but expand: the blocks of K of all strips are dealt to the
// blocks of the launch, one by one. So each weight is expanded once, whatever the rows, and the tensor cores' shared
// memory has no part in it. Of the two counters of a strip one tells how much of it is there, the other how many halves
// of it tiles have read.
//
// Blocks wait for each other: all of a launch must be running. Tiles come back to the first strip of a group after the
// last one, so the ring has at least the strips of a group. Then nobody waits for ever: who waits for a strip has told
// of all that it has read, and the tiles of a strip whose slot is wanted need only strips before the one that wants it.

#ifndef MOE_RUNTIME_TMA_AHEAD
#define MOE_RUNTIME_TMA_AHEAD

#include "tma_expand.cuh"

#if AHEAD

constexpr int STRIP_ROWS = BOXES * BOX_ROWS;
constexpr u32 PAUSE_NS = 500;  // between looks at whether a slot is free

// How far a counter is, without any order of other memory accesses.
__device__ __forceinline__ u32 count_of(const u32* counter) {
  u32 count;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}

__device__ __forceinline__ void add_to_count(u32* counter, u32 count) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(count) : "memory");
}

// Between a count that is read or added to, and memory that it tells of.
__device__ __forceinline__ void order_memory() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Halves of a strip that tiles of its group read.
__device__ __forceinline__ int reads_of(int rows, int tiles_n, int column_tile) {
  int tiles_m = ceil_div(rows, BM);
  // The odd row tile is that of two column tiles, the second of which may be past the last.
  bool past = CLUSTER > 1 && tiles_m % CLUSTER && tiles_n % CLUSTER && column_tile == tiles_n - 1;
  return BOXES * (tiles_m + past);
}

// Strips in memory, as a kernel is given them.
struct Strips {
  u8* ring;
  u32* counters;
  int slots;

  __device__ __forceinline__ u32* written(int strip) const { return counters + 2 * strip; }
  __device__ __forceinline__ u32* read(int strip) const { return counters + 2 * strip + 1; }
  __device__ __forceinline__ int slot(int strip) const { return strip % slots; }

  // Halves that have yet to be read of the strip whose slot `strip` gets.
  __device__ __forceinline__ int missing(int strip, const Group* groups, int tiles_n) const {
    int before = strip - slots;
    if (before < 0) return 0;
    return reads_of(groups[before / tiles_n].rows, tiles_n, before % tiles_n) - (int)count_of(read(before));
  }
};

// The strips of a block's tiles, as the thread knows them that starts the copies.
struct Reader {
  const Strips& strips;
  int k_blocks, last_stage;        // of a tile
  int before = -1, halves_before;  // the last strip, if it has not yet told that it has been read
  int now, halves;

  __device__ __forceinline__ Reader(const Strips& strips, int k_blocks)
      : strips(strips), k_blocks(k_blocks), last_stage((k_blocks - 1) % STAGES) {}

  // The row of the ring at which the weights of a tile begin. Waits until all of them are there.
  __device__ __forceinline__ int find(const Block& block, const RingPhases& phases, const Tile& tile,
                                      int halves_of_tile, int group, int tiles_n) {
    // A cluster may reach past the last column tile. Nothing is stored there, and any weights will do.
    now = group * tiles_n + min(tile.column / TILE_COLUMNS, tiles_n - 1), halves = halves_of_tile;
    const u32* written = strips.written(now);
    u32 all = 4 * k_blocks;
    if (count_of(written) < all) {
      end(block, phases);
      for (long long start = 0; count_of(written) < all;) keep_patience(start);
    }
    order_memory();
    asm volatile("fence.proxy.async.global;" ::: "memory");
    return strips.slot(now) * k_blocks * STRIP_ROWS + tile.column % TILE_COLUMNS;
  }

  // The last stage of the tile before is free again: all of it has been read.
  __device__ __forceinline__ void go_on() {
    if (before >= 0) tell();
    before = now, halves_before = halves;
  }

  // Waits until the last tile has been read, and tells of it.
  __device__ __forceinline__ void end(const Block& block, const RingPhases& phases) {
    if (before < 0) return;
    barrier_wait(block.empty + 8 * last_stage, ~phases.now >> last_stage & 1);
    tell();
    before = -1;
  }

 private:
  __device__ __forceinline__ void tell() const {
    order_memory();
    add_to_count(strips.read(before), halves_before);
  }
};

// The jobs of a block, one after the other: a block of K of a strip each.
struct Job {
  int kb, group, column_tile, strip, slot;

  __device__ __forceinline__ Job(const Strips& strips, int tiles_n, int k_blocks)
      : kb(blockIdx.x % k_blocks), strip(blockIdx.x / k_blocks) {
    group = strip / tiles_n, column_tile = strip % tiles_n, slot = strip % strips.slots;
  }

  __device__ __forceinline__ void advance(const Strips& strips, int tiles_n, int k_blocks) {
    int step = gridDim.x / k_blocks;
    kb += gridDim.x % k_blocks;
    if (kb >= k_blocks) kb -= k_blocks, ++step;
    strip += step;
    for (column_tile += step; column_tile >= tiles_n; column_tile -= tiles_n) ++group;
    for (slot += step; slot >= strips.slots;) slot -= strips.slots;
  }

  // Where unit `u` is. The second half of a strip may be past the last column. Any weights will do then.
  __device__ __forceinline__ const u8* unit(int u, const u8* units, const Group* groups, int columns,
                                            int k_blocks) const {
    int block = column_tile * (TILE_COLUMNS / UNIT_ROWS) + (GATED ? u % 2 : u);
    return unit_at(units, groups[group].expert, GATED ? u / 2 : 0, block, columns, k_blocks) + kb * UNIT_BYTES;
  }
};

// What a thread has of a job: pieces of 16 weights, and scale codes.
struct Pieces {
  uint2 weights[UNITS][4];
  u32 codes[UNITS][2];

  __device__ __forceinline__ void load(const Job& job, const u8* units, const Group* groups, int columns,
                                       int k_blocks) {
    int thread = threadIdx.x % 128;
#pragma unroll
    for (int pair = 0; pair < UNITS / 2; ++pair) {
      const u8* unit = job.unit(2 * pair, units, groups, columns, k_blocks);
#pragma unroll
      for (int u = 2 * pair; u < 2 * pair + 2; ++u, unit += k_blocks * UNIT_BYTES) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint2& piece = weights[u][i];
          asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                       : "=r"(piece.x), "=r"(piece.y)
                       : "l"(unit + thread * 8 + i * 1024));
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const u8* from = unit + UNIT_QUANTS + (thread / 2 + 64 * i) * SCALE_BYTES_OF_THREAD;
          codes[u][i] = SCALES_OF_WORD == 2 ? *(const u32*)from : *(const u16*)from;
        }
      }
    }
  }

  // Piece `i` of a unit is of the first or last half of its word `64 * i + thread / 2`.
  __device__ __forceinline__ void expand(u32 table, u8* to) const {
    int thread = threadIdx.x % 128, half = SCALES_OF_WORD == 2 ? thread % 2 : 0;
    to += (8 * (thread / 64) + thread / 2 % 8) * 128 + thread % 64 / 16 * 32 + thread % 2 * 16;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint2 found = entry(table, codes[u][i % 2], SCALES_OF_WORD * (i / 2) + half);
        uint4 sixteen;
        expand_8(weights[u][i].x, found, sixteen.x, sixteen.y);
        expand_8(weights[u][i].y, found, sixteen.z, sixteen.w);
        *(uint4*)(to + u * UNIT_EXPANDED + i * 2048) = sixteen;
      }
    }
  }
};

// Expands the share of this block. Called by a warpgroup.
__device__ __forceinline__ void expand_strips(const Block& block, const Strips& strips, const u8* units, int num_groups,
                                              int tiles_n, int columns, int k_blocks) {
  u32 table = shared_address(block.table);
  int all = block.groups[num_groups].rows * tiles_n, missing = 0;
  Job job(strips, tiles_n, k_blocks);
  Pieces pieces;
  auto begin_job = [&] {
    if (job.strip >= all) return;
    missing = strips.missing(job.strip, block.groups, tiles_n);
    Job next = job;
    next.advance(strips, tiles_n, k_blocks);
    int u = threadIdx.x % 128;
    if (u < UNITS && next.strip < all) {
      asm volatile(
          "cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(next.unit(u, units, block.groups, columns, k_blocks)),
          "r"(UNIT_BYTES)
          : "memory");
    }
    pieces.load(job, units, block.groups, columns, k_blocks);
  };
  begin_job();
  while (job.strip < all) {
    if (missing > 0) {
      for (long long start = 0; strips.missing(job.strip, block.groups, tiles_n) > 0; keep_patience(start))
        asm volatile("nanosleep.u32 %0;" ::"r"(PAUSE_NS));
      order_memory();
    }
    pieces.expand(table, strips.ring + (long long)(job.slot * k_blocks + job.kb) * (STRIP_ROWS * 128));
    u32* written = strips.written(job.strip);
    job.advance(strips, tiles_n, k_blocks);
    begin_job();  // its weights are on their way while these reach L2
    asm volatile("fence.proxy.async.global;" ::: "memory");
    order_memory();  // of what is written, and of what was read before its slot is
    __syncwarp();
    if (threadIdx.x % 32 == 0) add_to_count(written, 1);
  }
}

#endif

#endif
