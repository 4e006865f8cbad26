// MMAs of the tensor cores and their sums in registers, for inclusion by tma_gemm.cu.

#ifndef MOE_RUNTIME_TMA_PRODUCTS
#define MOE_RUNTIME_TMA_PRODUCTS

#include "tma_sizes.cuh"

// Named barriers by which a warpgroup waits until the other has read all stages of a tile of its own: waiting for a
// stage further ahead would take an older phase of its barrier for the new one.
__device__ __forceinline__ void wait_turn(int wg) { asm volatile("bar.sync %0, 256;" ::"r"(1 + wg) : "memory"); }
__device__ __forceinline__ void give_turn(int wg) { asm volatile("bar.arrive %0, 256;" ::"r"(2 - wg) : "memory"); }

// Whether `value` holds in all threads of the warpgroup. The branch is uniform, because an MMA needs all its warps.
__device__ __forceinline__ bool all_of_warpgroup(int wg, bool value) {
  u32 all;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.b32 q, %1, 0;\nbar.red.and.pred p, %2, 128, q;\nselp.b32 %0, 1, 0, p;\n}"
               : "=r"(all)
               : "r"((u32)value), "r"(3 + wg)
               : "memory");
  return __all_sync(~0u, all);  // makes it warp-uniform for the compiler, like `uniform`
}

// Lower word of the descriptor of a K-major operand in the 128-byte swizzle; 32 bytes of K advance it by 2. The upper
// word encodes that groups of 8 rows lie 1024 bytes apart.
__device__ __forceinline__ u32 descriptor(u32 address) { return (address & 0x3FFFF) >> 4 | 1 << 16; }

template <int N>
__device__ __forceinline__ void keep(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

#define F4(r, i) "+f"(r[i]), "+f"(r[i + 1]), "+f"(r[i + 2]), "+f"(r[i + 3])
#define F16(r, i) F4(r, i), F4(r, i + 4), F4(r, i + 8), F4(r, i + 12)
#define F64(r, i) F16(r, i), F16(r, i + 16), F16(r, i + 32), F16(r, i + 48)

// clang-format off
#define SUMS_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21," \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41," \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61," \
  "%62, %63"
#define SUMS_128 \
  SUMS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81," \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101," \
  "%102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118," \
  "%119, %120, %121, %122, %123, %124, %125, %126, %127"

// Operands of a wgmma with descriptors of the lower words `a` and `b`.
#define DESCRIPTORS(a, b, add)                                     \
  "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, " add ", 0;\n" \
  "mov.b64 a, {" a ", 0x40000040};\nmov.b64 b, {" b ", 0x40000040};\n"
// clang-format on

// d (+)= a[64, 32 bytes of K] * b[128 rows]^T; `add` 0 starts from zero.
__device__ __forceinline__ void mma_fp8(float (&d)[64], u32 a, u32 b, int add) {
  asm volatile(DESCRIPTORS("%64", "%65", "%66") "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" SUMS_64
                                                "}, a, b, p, 1, 1;\n}"
               : F64(d, 0)
               : "r"(a), "r"(b), "r"(add));
}

// Loads a word of shared memory, or nothing, without a branch: after one, the compiler would assume a diverged warp.
__device__ __forceinline__ void load_word(float& to, u32 from, bool now) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.shared.f32 %0, [%1];\n}"
               : "+f"(to)
               : "r"(from), "r"((u32)now)
               : "memory");
}

#if ROWS < 128  // few rows

#if FP8
#define OPERANDS_OF_FEW "k32.f32.e4m3.e4m3"
#define SIGNS_OF_FEW "1, 1"
#else
#define OPERANDS_OF_FEW "k16.f32.bf16.bf16"
#define SIGNS_OF_FEW "1, 1, 0, 0"
#endif

// d[64 weight rows, BM rows] (+)= weights[64, 32 bytes of K] * rows[BM]^T, in the sums from FIRST on.
template <int FIRST>
__device__ __forceinline__ void mma_few(float (&d)[BM], u32 weights, u32 rows, int add) {
#if ROWS == 8
  asm volatile(DESCRIPTORS("%4", "%5", "%6") "wgmma.mma_async.sync.aligned.m64n8" OPERANDS_OF_FEW
                                             " {%0, %1, %2, %3}, a, b, p, " SIGNS_OF_FEW ";\n}"
               : F4(d, FIRST)
               : "r"(weights), "r"(rows), "r"(add));
#elif ROWS == 16
  asm volatile(DESCRIPTORS("%8", "%9", "%10") "wgmma.mma_async.sync.aligned.m64n16" OPERANDS_OF_FEW
                                              " {%0, %1, %2, %3, %4, %5, %6, %7}, a, b, p, " SIGNS_OF_FEW ";\n}"
               : F4(d, FIRST), F4(d, FIRST + 4)
               : "r"(weights), "r"(rows), "r"(add));
#else
  asm volatile(DESCRIPTORS("%16", "%17", "%18") "wgmma.mma_async.sync.aligned.m64n32" OPERANDS_OF_FEW
                                                " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
                                                "%12, %13, %14, %15}, a, b, p, " SIGNS_OF_FEW ";\n}"
               : F16(d, FIRST)
               : "r"(weights), "r"(rows), "r"(add));
#endif
}

// d (+)= weights[128] * rows[BM]^T over the 128 bytes of K of a stage. A thread has, in either half of `d`, of each 8
// rows those of numbers lane % 4 * 2 and the next, d[4j] and d[4j + 1] with weight row `lane / 4` of its warp's 16,
// d[4j + 2] and d[4j + 3] with that 8 further.
__device__ __forceinline__ void multiply(float (&d)[BM], u32 weights, u32 rows, bool add) {
  keep(d);
  mma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    mma_few<0>(d, weights + 2 * k, rows + 2 * k, add || k > 0);
    mma_few<BM / 2>(d, weights + (HALF_BYTES / 2 >> 4) + 2 * k, rows + 2 * k, add || k > 0);
  }
  mma_commit();
}

// acc += part * (scale of the row * scale of the weight). Where that product is not a normal number, the scale of the
// row is applied first. `scales` are those of a stage.
__device__ __forceinline__ void add_up(float (&acc)[BM], float (&part)[BM], const float* scales) {
  const float2* of_rows = (const float2*)(scales + threadIdx.x % 4 * 2);
  float a[BM / 4], w[2] = {scales[BM], scales[BM + 1]};
#pragma unroll
  for (int j = 0; j < BM / 8; ++j) a[2 * j] = of_rows[4 * j].x, a[2 * j + 1] = of_rows[4 * j].y;
  mma_wait<0>();
  keep(part);
#pragma unroll
  for (int i = 0; i < BM; ++i) {
    float of_row = a[i % (BM / 2) / 4 * 2 + i % 2], of_weight = w[GATED && ORDER != INTERLEAVED ? i / (BM / 2) : 0];
    float both = of_row * of_weight, size = fabsf(both);
    bool apart = size < SMALLEST || size > LARGEST;  // NaN gives NaN either way
    float first = __fmul_rn(part[i], apart ? of_row : 1.0f);
    acc[i] = __fmaf_rn(first, apart ? of_weight : both, acc[i]);
  }
}
#else  // many rows

// part = a[64 rows] * b[128 rows]^T over the 128 bytes of K of a stage.
__device__ __forceinline__ void multiply(float (&part)[PARTIAL_SUMS], u32 a, u32 b) {
  keep(part);
  mma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) mma_fp8(part, a + 2 * k, b + 2 * k, k > 0);
  mma_commit();
}

// Like `mma_fp8` for bf16, into the first 64 sums.
template <int N>
__device__ __forceinline__ void mma_bf16_half(float (&d)[N], u32 a, u32 b, int add) {
  asm volatile(DESCRIPTORS("%64", "%65", "%66") "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SUMS_64
                                                "}, a, b, p, 1, 1, 0, 0;\n}"
               : F64(d, 0)
               : "r"(a), "r"(b), "r"(add));
}

// With 256 rows of b.
__device__ __forceinline__ void mma_bf16(float (&d)[128], u32 a, u32 b, int add) {
  asm volatile(DESCRIPTORS("%128", "%129", "%130") "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" SUMS_128
                                                   "}, a, b, p, 1, 1, 0, 0;\n}"
               : F64(d, 0), F64(d, 64)
               : "r"(a), "r"(b), "r"(add));
}

#if ROWS > 128

// Like `load_word`, but `to` is 0 without a load, and needs no register before.
__device__ __forceinline__ void load_word_or_zero(float& to, u32 from, bool now) {
  to = 0.0f;
  load_word(to, from, now);
}

// Factors of the partial sums of a thread's rows, two of each half, with weights of a scale, which are all or those of
// gate or up: the product of both scales if that is a normal number. Else (`apart`) the scale of the row is applied
// first, then that of the weight.
struct Factors {
  static constexpr int PARTS = GATED ? 2 : 1;
  float a[4], w[2], product[4][PARTS];

  __device__ __forceinline__ bool apart(int r, int p) const {
    float size = fabsf(product[r][p]);
    return size < SMALLEST || size > LARGEST;  // NaN gives NaN either way
  }

  // Computes the products of as many halves. Returns whether all of them are normal.
  template <int NUMBER>
  __device__ __forceinline__ bool multiply() {
    float least = LARGEST, most = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * NUMBER * PARTS; ++i) {
      float& both = product[i / PARTS][i % PARTS];
      both = a[i / PARTS] * w[i % PARTS];
      least = fminf(least, fabsf(both)), most = fmaxf(most, fabsf(both));
    }
    return !(least < SMALLEST || most > LARGEST);
  }
};

// acc += part * factors, for the half whose sums start at FIRST. Without PLAIN, products of scales may be not normal.
// Rows with normal ones get the same bits: they multiply by 1 first.
template <int FIRST, bool PLAIN>
__device__ __forceinline__ void add_up(float (&acc)[SUMS], float (&part)[PARTIAL_SUMS], const Factors& factors) {
  keep(part);
#pragma unroll
  for (int i = 0; i < PARTIAL_SUMS; ++i) {
    int r = FIRST / PARTIAL_SUMS * 2 + i / 2 % 2, p = i / (PARTIAL_SUMS / Factors::PARTS);
    bool apart = !PLAIN && factors.apart(r, p);
    float first = PLAIN ? part[i] : __fmul_rn(part[i], apart ? factors.a[r] : 1.0f);
    acc[FIRST + i] = __fmaf_rn(first, apart ? factors.w[p] : factors.product[r][p], acc[FIRST + i]);
  }
  keep(acc);  // finish before the next MMAs overwrite `part`
}

#else  // tiles of 128 rows

// Factors of the partial sums of a thread's two rows in both halves: the product of both scales if that is a normal
// number. Else (`apart`) the scale of the row is applied first, then that of the weight.
struct Factors {
  float a[2], w[2], product[2][2];

  __device__ __forceinline__ bool apart(int r, int h) const {
    float size = fabsf(product[r][h]);
    return size < SMALLEST || size > LARGEST;  // NaN gives NaN either way
  }

  // Computes the products. Returns whether all of them and `least` are normal.
  __device__ __forceinline__ bool multiply(float least) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      product[i % 2][i / 2] = a[i % 2] * w[i / 2];
      least = fminf(least, fabsf(product[i % 2][i / 2])), most = fmaxf(most, fabsf(product[i % 2][i / 2]));
    }
    return !(least < SMALLEST || most > LARGEST);
  }
};

// acc += part * factors, for the half whose sums start at FIRST. Without PLAIN, products of scales may be not normal.
// Rows and halves with normal ones get the same bits: they multiply by 1 first.
template <int FIRST, bool PLAIN>
__device__ __forceinline__ void add_up(float (&acc)[SUMS], float (&part)[PARTIAL_SUMS], const Factors& factors) {
  keep(part);
#pragma unroll
  for (int i = 0; i < PARTIAL_SUMS; ++i) {
    int r = i / 2 % 2;
    int h = GATED && ORDER == INTERLEAVED ? i / 32 : FIRST / PARTIAL_SUMS;
    bool apart = !PLAIN && factors.apart(r, h);
    float first = PLAIN ? part[i] : __fmul_rn(part[i], apart ? factors.a[r] : 1.0f);
    acc[FIRST + i] = __fmaf_rn(first, apart ? factors.w[h] : factors.product[r][h], acc[FIRST + i]);
  }
  keep(acc);  // finish before the next MMAs overwrite `part`
}
#endif  // tiles of 128 rows
#endif  // many rows

#endif
