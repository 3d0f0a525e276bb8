// arithmetic.cu -- CUDA's functions and types that a C++ compiler does not bring, on one value a
// thread
static_assert(sizeof(float4) == 16 && alignof(float4) == 16 && alignof(int2) == 8 &&
              alignof(double2) == 16);
static_assert(sizeof(sqrt(1.0f)) == 4 && sizeof(fma(1.0f, 1.0f, 1.0f)) == 4 &&
              sizeof(rsqrt(1.0)) == 8);
static_assert(sizeof(min(1, 1ll)) == 8 && min(-1, 1u) == 1u && max(-1, 1) == 1 &&
              max(2.5f, 1) == 2.5f);

struct Arithmetic {
  const float* x;
  float* y;  // [9, 32]
};

__global__ void arithmetic(Arithmetic arguments) {
  const float x = arguments.x[threadIdx.x];
  float* y = arguments.y + threadIdx.x;
  y[0] = rsqrtf(x);
  y[32] = sqrt(x);
  y[64] = __fdiv_rn(1.0f, __fmul_rn(x, 3.0f));
  y[96] = fma(x, x, -__fmul_rn(x, x));  // what rounding the square drops
  y[128] = x * x - __fmul_rn(x, x);     // 0: nothing is contracted
  y[160] = min(x, __int_as_float(0x7fc00000));
  y[192] = max(__uint_as_float(0x7fc00000u), x);
  y[224] = __uint_as_float(__float_as_uint(x) ^ 0x80000000u);
  y[256] = make_float4(1, 2, 3, x).w + float(isnan(x) || isinf(x)) + abs(-x);
}
