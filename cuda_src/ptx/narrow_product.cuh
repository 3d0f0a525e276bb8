// narrow_product.cuh -- PTX for a product of a warpgroup: 64 x 16 by 16 x 32, from shared memory
//
// PTX ISA: wgmma.mma_async (sm_90a), with a plain C++ twin for the CPU.
//
// multiply_narrow<T>(d, weight, x)   d += weight x^T. weight: an operand of 64 rows, x: of 32 rows
//                                    (product_operand). d: as in warpgroup_product.cuh
#pragma once
#include "warpgroup_product.cuh"

#ifdef CUPYNORM_ON_CPU

template <class T>
__device__ __forceinline__ void multiply_narrow(float (&d)[16], unsigned long long weight,
                                                unsigned long long x) {
  on_cpu::multiply(d, nullptr, weight, x, true, is_same<T, __nv_bfloat16>, 32);
}

#else

template <class T>
__device__ __forceinline__ void multiply_narrow(float (&d)[16], unsigned long long weight,
                                                unsigned long long x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32%18%18 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, %16, %17, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15])
      : "l"(weight), "l"(x), "C"(PtxType<T>::name));
}

#endif
