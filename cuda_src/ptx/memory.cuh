// memory.cuh -- PTX for shared memory and the L2 cache
//
// PTX ISA: prefetch, cp.async (sm_80), ld.global.L1::no_allocate. There are C++ twins for the CPU.
//
// dynamic_smem()                   this block's dynamic shared memory, 128-byte aligned
// prefetch(array, size)            called by one block: brings an array, or null, to the L2 cache
// async_copy<size>(smem, global)   starts the copy of a pack of `size` elements
// async_commit()                   the copies since the last commit become a group
// async_wait<pending>()            until at most `pending` groups of this thread are in flight
// load_once(pack, at, is_there)    replaces a pack, if it is there, that nobody else reads
#pragma once
#include "pack.cuh"

__device__ __forceinline__ void prefetch(const void*, long long) {}

#ifdef CUPYNORM_ON_CPU

template <class T>
__device__ __forceinline__ void prefetch(const T*, long long) {}
template <int size, class T>
__device__ __forceinline__ void async_copy(T* smem, const T* global) {
  store_pack<size>(smem, load_pack<size>(global));
}
__device__ __forceinline__ void async_commit() {}
template <int pending>
__device__ __forceinline__ void async_wait() {}
template <class T>
__device__ __forceinline__ void load_once(Pack<T, 8>& pack, const T* address, bool is_there) {
  if (is_there) pack = load_pack<8>(address);
}

#else

__device__ __forceinline__ unsigned char* dynamic_smem() {
  extern __shared__ __align__(128) unsigned char smem[];
  return smem;
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
  if constexpr (bytes == 16) {  // only these can bypass the L1 cache
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
// Into the pack's own registers: a compiler that loads early would need others.
template <class T>
__device__ __forceinline__ void load_once(Pack<T, 8>& pack, const T* address, bool is_there) {
  asm volatile(
      "{\n.reg .pred there;\nsetp.ne.b32 there, %5, 0;\n"
      "@there ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(pack.word[0]), "+r"(pack.word[1]), "+r"(pack.word[2]), "+r"(pack.word[3])
      : "l"(address), "r"(static_cast<int>(is_there)));
}

#endif
