// packs.cu -- y = factor x in packs of 16 bytes: what sanitizers watch, and a header that can
// change
#include "factor.cuh"

struct Packs {
  const float* x;
  float* y;
  long long num_packs;
};

struct alignas(16) Pack {
  float values[4];
};

__global__ void scale_packs(Packs arguments) {
  for (long long pack = threadIdx.x; pack < arguments.num_packs; pack += blockDim.x) {
    Pack values = reinterpret_cast<const Pack*>(arguments.x)[pack];
    for (float& value : values.values) value *= factor;
    reinterpret_cast<Pack*>(arguments.y)[pack] = values;
  }
}

struct SharedRead {
  float* y;
  long long offset;
};

__global__ void shared_read(SharedRead arguments) {
  auto* values = reinterpret_cast<float*>(dynamic_smem());
  values[threadIdx.x] = 1.0f;
  __syncthreads();
  arguments.y[threadIdx.x] = values[threadIdx.x + arguments.offset];
}
