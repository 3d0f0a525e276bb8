// convert.cu -- y = x in another type, one thread an element
#include <cuda_bf16.h>
#include <cuda_fp16.h>

struct Convert {
  const void* x;
  void* y;
};

struct HalfToFloat {
  using From = __half;
  static float convert(From x) { return __half22float2(__half2{x, x}).y; }
};
struct BfloatToFloat {
  using From = __nv_bfloat16;
  static float convert(From x) { return __bfloat162float(x); }
};
struct FloatToHalf {
  using From = float;
  static __half convert(From x) { return __float22half2_rn(make_float2(0.0f, x)).y; }
};
struct FloatToBfloat {
  using From = float;
  static __nv_bfloat16 convert(From x) { return __float22bfloat162_rn(make_float2(x, 0.0f)).x; }
};
struct DoubleToHalf {
  using From = double;
  static __half convert(From x) { return __double2half(x); }
};
struct DoubleToBfloat {
  using From = double;
  static __nv_bfloat16 convert(From x) { return __double2bfloat16(x); }
};

template <typename Conversion>
__global__ void convert(Convert arguments) {
  const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
  auto* x = static_cast<const typename Conversion::From*>(arguments.x);
  auto* y = static_cast<decltype(Conversion::convert(*x))*>(arguments.y);
  y[index] = Conversion::convert(__ldg(x + index));
}
