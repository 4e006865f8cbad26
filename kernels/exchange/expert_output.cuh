// Rows of experts' outputs in bf16 or fp32, for inclusion after quantize.cuh.

// Number `n` of a unit of an expert's row, rounded to bf16.
template <int OUTPUT_BYTES, int LOADS>
__device__ __forceinline__ float output_number(const uint4 (&raw)[LOADS], int n) {
  const uint4 four = raw[n * OUTPUT_BYTES / 16];
  const int word = n * OUTPUT_BYTES / 4 % 4;
  const u32 bits = word == 0 ? four.x : word == 1 ? four.y : word == 2 ? four.z : four.w;
  return bf16_value(OUTPUT_BYTES == 2 ? bits >> 16 * (n % 2) & 0xFFFF : bf16_bits(__uint_as_float(bits)));
}

// A valid unit, also for threads that have none.
__device__ __forceinline__ int inside(int unit, int units) { return min(unit, units - 1); }
