// next_kernel.cuh -- PTX for programmatic dependent launch: one kernel starts before another ends
//
// PTX ISA: griddepcontrol (sm_90; before, both do nothing). On the CPU kernels run one after the
// other.
//
// let_next_kernel_start()    the next kernel may start, if it was launched with that attribute
// await_previous_kernel()    in such a kernel: until the previous one has ended and its writes are
//                            visible
#pragma once

#ifdef CUPYNORM_ON_CPU

__device__ __forceinline__ void let_next_kernel_start() {}
__device__ __forceinline__ void await_previous_kernel() {}

#else

__device__ __forceinline__ void let_next_kernel_start() {
  if constexpr (__CUDA_ARCH__ >= 900)
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void await_previous_kernel() {
  if constexpr (__CUDA_ARCH__ >= 900) asm volatile("griddepcontrol.wait;" ::: "memory");
}

#endif
