// cluster.cuh -- PTX for shared memory, clusters, the L2 cache, the next kernel, and a maximum
// PTX ISA: mapa, barrier.cluster, griddepcontrol (sm_90; before, griddepcontrol does nothing),
// prefetch, redux.sync, cp.async. Each function has a plain C++ twin for the CPU.
// dynamic_smem()            this block's dynamic shared memory, 128-byte aligned
// cluster_rank(), cluster_sync()   a block's rank; a barrier, which orders the shared memory
// cluster_map(at, rank)     the address of `at` in the shared memory of block `rank`
// prefetch(array, size)     called by one block: brings an array to the L2 cache; null: absent
// async_copy<size>(smem, global), async_commit()   start the copy of a pack; end a group of them
// async_wait<pending>()     until all groups of this thread but the last `pending` have landed
// let_next_kernel_start()   lets a next kernel start early, if its launch allows it (overlaps)
// await_previous_kernel()   in such a kernel: until the previous one has ended, writes are seen
// warp_max(value)           the largest value of a warp, to all lanes; before sm_80 by shuffles
#pragma once
#include "pack.cuh"

__device__ __forceinline__ void prefetch(const void*, long long) {}

#ifdef CUPYNORM_ON_CPU

__device__ __forceinline__ unsigned cluster_rank() { return on_cpu::cluster_rank(); }
__device__ __forceinline__ void cluster_sync() {
  on_cpu::cluster_arrive();
  on_cpu::cluster_wait();
}
template <class T>
__device__ __forceinline__ T* cluster_map(T* at, unsigned rank) {
  return static_cast<T*>(on_cpu::cluster_map(at, rank));
}
template <class T>
__device__ __forceinline__ void prefetch(const T*, long long) {}
template <int size, class T>
__device__ __forceinline__ void async_copy(T* smem, const T* global) {
  store_pack<size>(smem, load_pack<size>(global));
}
__device__ __forceinline__ void async_commit() {}
template <int pending>
__device__ __forceinline__ void async_wait() {}
// On the CPU kernels run one after the other.
__device__ __forceinline__ void let_next_kernel_start() {}
__device__ __forceinline__ void await_previous_kernel() {}
__device__ __forceinline__ unsigned warp_max(unsigned value) {
  for (int distance = 16; distance > 0; distance /= 2)
    value = max(value, __shfl_xor_sync(0xffffffffu, value, distance));
  return value;
}

#else

__device__ __forceinline__ unsigned char* dynamic_smem() {
  extern __shared__ __align__(128) unsigned char smem[];
  return smem;
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
template <class T>
__device__ __forceinline__ void prefetch(const T* array, long long size) {
  constexpr int line = 128 / sizeof(T);
  for (long long at = static_cast<long long>(threadIdx.x) * line; at < size;
       at += blockDim.x * line) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(array + at));
  }
}
// Copies have 4, 8 or 16 bytes.
template <int size, class T>
__device__ __forceinline__ void async_copy(T* smem, const T* global) {
  constexpr int bytes = size * sizeof(T);
  const auto at = static_cast<unsigned>(__cvta_generic_to_shared(smem));
  if constexpr (bytes == 16) {  // these alone can pass by the L1 cache
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(global) : "memory");
  } else if constexpr (bytes >= 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(global), "n"(bytes)
                 : "memory");
  } else {
    store_pack<size>(smem, load_pack<size>(global));
  }
}
__device__ __forceinline__ void async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int pending>
__device__ __forceinline__ void async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
__device__ __forceinline__ void let_next_kernel_start() {
  if constexpr (__CUDA_ARCH__ >= 900)
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void await_previous_kernel() {
  if constexpr (__CUDA_ARCH__ >= 900) asm volatile("griddepcontrol.wait;" ::: "memory");
}
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
