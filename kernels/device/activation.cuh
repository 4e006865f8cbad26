// Activation functions of fp32 values, for inclusion; `kernels/gemm/activation.py` has them for Triton. NaN stays NaN.

#ifndef MOE_RUNTIME_ACTIVATION
#define MOE_RUNTIME_ACTIVATION

constexpr int GELU = 2, GELU_TANH = 3, RELU2 = 4;  // ActivationFunction.code

__device__ __forceinline__ float squared_relu(float x) {
  const float positive = x < 0.0f ? 0.0f : x;
  return __fmul_rn(positive, positive);
}

__device__ __forceinline__ float softcapped(float x, float cap) { return __fmul_rn(cap, tanhf(__fdiv_rn(x, cap))); }

__device__ __forceinline__ float gelu(float x) {
  return __fmul_rn(__fmul_rn(0.5f, x), __fadd_rn(1.0f, erff(__fmul_rn(x, 0x1.6a09e6p-1f))));  // sqrt(1/2)
}

// The approximation of GELU by tanh is x * sigmoid of this: 2 * sqrt(2 / pi) * (x + 0.044715 * x^3).
__device__ __forceinline__ float gelu_tanh_slope(float x) {
  const float cube = __fmul_rn(__fmul_rn(x, x), x);
  return __fmul_rn(0x1.988454p+0f, __fmaf_rn(0x1.6e4e26p-5f, cube, x));
}

#endif
