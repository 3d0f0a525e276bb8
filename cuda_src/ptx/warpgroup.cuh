// warpgroup.cuh -- PTX for warpgroups: registers, order of products, with C++ twins
//
// keep_registers<n>()      the threads of a warpgroup give back registers, down to n (sm_90a)
// take_registers<n>()      or wait for more, up to n
// fence_tile_store()       each writing thread, before the copy engine or a product reads its tile
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
