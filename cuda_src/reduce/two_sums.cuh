// two_sums.cuh -- two sums over a warp at once: each half of its lanes gets one
#pragma once
#include "reduce.cuh"

// Whether this lane has the second of two values.
__device__ __forceinline__ bool has_second() { return threadIdx.x & 16; }

// Sums two values over a warp with one shuffle more than one sum takes. Each half of the lanes gets
// its own sum.
__device__ __forceinline__ float warp_reduce_two(float first, float second) {
  const float other = has_second() ? first : second;
  const float kept = has_second() ? second : first;
  return warp_sum<16>(kept + __shfl_xor_sync(0xffffffffu, other, 16));
}
// Returns the values of both halves to all lanes.
__device__ __forceinline__ Sum<float, 2> both_halves(float own) {
  return {{__shfl_sync(0xffffffffu, own, 0), __shfl_sync(0xffffffffu, own, 16)}};
}
