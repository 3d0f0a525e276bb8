// warpgroup.cuh -- PTX for warpgroups: registers, fragments, order of products, with C++ twins
//
// keep_registers<n>()      the threads of a warpgroup give back registers, down to n (sm_90a)
// take_registers<n>()      or wait for more, up to n
// load_fragment(a, smem)   ldmatrix: four 8 x 8 matrices of 16-bit elements. Each lane has the
//                          address of a row of 8: lanes 0-7 of matrix 0, and so on
// store_fragment(smem, a)  stmatrix: the reverse
// fence_tile_store()       each writing thread, before one of them stores a tile
// products_begin()         before products, after registers of theirs were written
// products_commit()        what was started since the last commit becomes a group
// products_wait<pending>() until at most `pending` groups are not done
#pragma once
#include "bulk.cuh"

#ifdef CUPYNORM_ON_CPU

template <int count>
__device__ __forceinline__ void keep_registers() {}
template <int count>
__device__ __forceinline__ void take_registers() {}
__device__ __forceinline__ unsigned smem_address(const void* smem) {
  return on_cpu::smem_address(smem);
}
__device__ __forceinline__ void load_fragment(unsigned (&a)[4], const void* smem) {
  on_cpu::load_fragment(a, smem);
}
__device__ __forceinline__ void store_fragment(void* smem, const unsigned (&a)[4]) {
  on_cpu::store_fragment(smem, a);
}
__device__ __forceinline__ void fence_tile_store() { on_cpu::fence_proxy_async(); }
__device__ __forceinline__ void products_begin() {}
__device__ __forceinline__ void products_commit() { on_cpu::products_commit(); }
template <int pending>
__device__ __forceinline__ void products_wait() {
  on_cpu::products_wait(pending);
}

#else

template <int count>
__device__ __forceinline__ void keep_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
__device__ __forceinline__ void load_fragment(unsigned (&a)[4], const void* smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(smem_address(smem))
               : "memory");
}
__device__ __forceinline__ void store_fragment(void* smem, const unsigned (&a)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address(smem)),
      "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
      : "memory");
}
__device__ __forceinline__ void fence_tile_store() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int pending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

#endif
