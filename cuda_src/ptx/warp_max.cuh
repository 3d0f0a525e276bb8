// warp_max.cuh -- PTX for a maximum over a warp
//
// PTX ISA: redux.sync (sm_80; before by shuffles), with a plain C++ twin for the CPU.
//
// warp_max(value)    the largest value of a warp, to all of its lanes
#pragma once

#ifdef CUPYNORM_ON_CPU

__device__ __forceinline__ unsigned warp_max(unsigned value) {
  for (int distance = 16; distance > 0; distance /= 2)
    value = max(value, __shfl_xor_sync(0xffffffffu, value, distance));
  return value;
}

#else

__device__ __forceinline__ unsigned warp_max(unsigned value) {
  if constexpr (__CUDA_ARCH__ >= 800) {
    asm volatile("redux.sync.max.u32 %0, %0, 0xffffffff;" : "+r"(value));
  } else {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      value = max(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

#endif
