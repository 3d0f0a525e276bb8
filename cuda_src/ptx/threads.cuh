// threads.cuh -- PTX for warps, thread-block clusters (sm_90) and kernels that overlap
//
// PTX ISA: redux.sync (sm_80), mapa, barrier.cluster, griddepcontrol (sm_90; before, both of the
// last do nothing). Each function has a plain C++ twin for the CPU.
//
// warp_max(value)           the largest value of a warp, to all of its lanes
// cluster_rank()            the rank of this block in its cluster
// cluster_sync()            a barrier of all threads of the cluster, which orders shared memory
// cluster_map(at, rank)     the address of `at` in the shared memory of block `rank`
// let_next_kernel_start()   the next kernel may start, if it was launched with that attribute
// await_previous_kernel()   in such a kernel: until the previous one has ended and its writes show
#pragma once

#ifdef CUPYNORM_ON_CPU

__device__ __forceinline__ unsigned warp_max(unsigned value) {
  for (int distance = 16; distance > 0; distance /= 2)
    value = max(value, __shfl_xor_sync(0xffffffffu, value, distance));
  return value;
}
__device__ __forceinline__ unsigned cluster_rank() { return on_cpu::cluster_rank(); }
__device__ __forceinline__ void cluster_sync() {
  on_cpu::cluster_arrive();
  on_cpu::cluster_wait();
}
template <class T>
__device__ __forceinline__ T* cluster_map(T* at, unsigned rank) {
  return static_cast<T*>(on_cpu::cluster_map(at, rank));
}
__device__ __forceinline__ void let_next_kernel_start() {}
__device__ __forceinline__ void await_previous_kernel() {}

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
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}
template <class T>
__device__ __forceinline__ T* cluster_map(T* at, unsigned rank) {
  T* mapped;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(at), "r"(rank));
  return mapped;
}
__device__ __forceinline__ void let_next_kernel_start() {
  if constexpr (__CUDA_ARCH__ >= 900)
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void await_previous_kernel() {
  if constexpr (__CUDA_ARCH__ >= 900) asm volatile("griddepcontrol.wait;" ::: "memory");
}

#endif
