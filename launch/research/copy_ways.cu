// Ways of copying between GPUs that `link_bench.py` compares.
//
// Every rank copies `bytes` to (or, by loads, from) each peer, in pieces of PIECE bytes; neighbouring blocks take pieces of
// different peers.
//
// Macros: WAY (0: 16-byte stores to the peer, 1: copies of shared memory by the copy engine, 2: 16-byte loads from the
// peer), WORLD, PIECE (bytes), THREADS.

#include "bulk_store.cuh"

constexpr int WORDS = PIECE / 16, PER_THREAD = (WORDS + THREADS - 1) / THREADS;

extern "C" __global__ void __launch_bounds__(THREADS)
    copy_way(const u64* sources, const u64* targets, long long bytes, int rank) {
  __shared__ __align__(128) uint4 staged[2][WORDS];
  const long long pieces = bytes / PIECE * (WORLD - 1);
  int stage = 0;
  for (long long piece = blockIdx.x; piece < pieces; piece += gridDim.x, stage ^= 1) {
    const int peer = (rank + 1 + static_cast<int>(piece % (WORLD - 1))) % WORLD;
    const long long at = piece / (WORLD - 1) * PIECE;
    // The part of a rank's source that is for a peer, and the part of its target that comes from one.
    const int from = WAY == 2 ? peer : rank, to = WAY == 2 ? rank : peer;
    const uint4* source = reinterpret_cast<const uint4*>(sources[from] + to * bytes + at);
    uint4* target = reinterpret_cast<uint4*>(targets[to] + from * bytes + at);
    uint4 words[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const int word = i * THREADS + threadIdx.x;
      if (word < WORDS) words[i] = __ldcg(source + word);
    }
    if (WAY == 1) {
      if (threadIdx.x == 0) bulk_await_read<1>();
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const int word = i * THREADS + threadIdx.x;
      if (word < WORDS) (WAY == 1 ? staged[stage] : target)[word] = words[i];
    }
    if (WAY == 1) {
      bulk_fence();
      __syncthreads();
      if (threadIdx.x == 0) {
        bulk_store(reinterpret_cast<u64>(target), staged[stage], PIECE);
        bulk_commit();
      }
    }
  }
  if (WAY == 1 && threadIdx.x == 0) bulk_await();
}
