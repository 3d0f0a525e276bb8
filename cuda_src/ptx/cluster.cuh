// cluster.cuh -- PTX for thread-block clusters (sm_90)
//
// PTX ISA: mapa, barrier.cluster. Each function has a plain C++ twin for the CPU.
//
// cluster_rank()            the rank of this block in its cluster
// cluster_sync()            a barrier of all threads of the cluster, which orders shared memory
// cluster_arrive()          the same in two halves, but only new mbarriers are ordered
// cluster_wait()
// cluster_map(at, rank)     the address of `at` in the shared memory of block `rank`
#pragma once

#ifdef CUPYNORM_ON_CPU

__device__ __forceinline__ unsigned cluster_rank() { return on_cpu::cluster_rank(); }
__device__ __forceinline__ void cluster_sync() {
  on_cpu::cluster_arrive();
  on_cpu::cluster_wait();
}
__device__ __forceinline__ void cluster_arrive() { on_cpu::cluster_arrive(); }
__device__ __forceinline__ void cluster_wait() { on_cpu::cluster_wait(); }
template <class T>
__device__ __forceinline__ T* cluster_map(T* at, unsigned rank) {
  return static_cast<T*>(on_cpu::cluster_map(at, rank));
}

#else

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
template <class T>
__device__ __forceinline__ T* cluster_map(T* at, unsigned rank) {
  T* mapped;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(at), "r"(rank));
  return mapped;
}

#endif
