// cuda_on_cpu.h -- just enough CUDA for a C++20 compiler to run the .cu files unchanged
// models  1-D grids, blocks and clusters; warps of 32 lanes; dynamic shared memory; mbarriers, bulk
//         copies. Every thread is a fiber; the blocks of one cluster run together, clusters one
//         after the other. A fiber is interrupted only where it synchronises; the seed of the
//         launch decides which one runs next.
// shows   missing barriers (wrong results under some seeds); deadlocks, bad masks, overruns (as
//         sentences).
// not     static __shared__ variables, textures, streams, preemption: a loop that spins on memory
//         never ends.
// needs   to be included first; cuda_on_cpu_runtime.cpp is the scheduler. No standard header is
//         included, as under NVRTC, so that a kernel compiles in a tenth of a second.
#pragma once
#define CUPYNORM_ON_CPU 1

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

using size_t = decltype(sizeof(0));

#include "arithmetic.h"
#include "cuda_on_cpu_runtime.h"

inline void __syncthreads() { on_cpu::block_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  on_cpu::warp_call(on_cpu::WarpCall::syncwarp, mask, 0, 0, 32);
}

namespace on_cpu {
template <typename Value>
inline Value shuffle(WarpCall call, unsigned mask, Value value, unsigned lane, int width) {
  static_assert(sizeof(Value) == 4 || sizeof(Value) == 8, "A shuffle moves 4 or 8 bytes.");
  unsigned long long word = 0;
  __builtin_memcpy(&word, &value, sizeof value);
  word = warp_call(call, mask, word, lane, width);
  __builtin_memcpy(&value, &word, sizeof value);
  return value;
}
}  // namespace on_cpu

template <typename Value>
inline Value __shfl_sync(unsigned mask, Value value, int lane, int width = 32) {
  return on_cpu::shuffle(on_cpu::WarpCall::shfl, mask, value, lane, width);
}
template <typename Value>
inline Value __shfl_xor_sync(unsigned mask, Value value, int lane_mask, int width = 32) {
  return on_cpu::shuffle(on_cpu::WarpCall::shfl_xor, mask, value, lane_mask, width);
}
inline int __all_sync(unsigned mask, int predicate) {
  return on_cpu::warp_call(on_cpu::WarpCall::ballot, mask, predicate != 0, 0, 32) == mask;
}

// One fiber runs at a time, so an atomic is a plain update, before which another thread may run.
template <typename Value>
inline Value atomicAdd(Value* address, decltype(Value() + Value()) value) {
  on_cpu::yield();
  const Value old = *address;
  *address = old + value;
  return old;
}
template <typename Value>
inline Value atomicMax(Value* address, decltype(Value() + Value()) value) {
  on_cpu::yield();
  const Value old = *address;
  *address = old < value ? value : old;
  return old;
}

template <typename Value>
inline Value __ldg(const Value* address) {
  return *address;
}
template <typename Value>
inline Value __ldcg(const Value* address) {
  return *address;
}

namespace on_cpu {

template <auto function>
struct Instance;
template <typename Arguments, void (*function)(Arguments)>
struct Instance<function> {
  static_assert(__is_trivially_copyable(Arguments) && sizeof(Arguments) % 8 == 0,
                "A kernel takes one struct made of 8-byte words.");
  static void run(const void* words) {
    alignas(Arguments) unsigned char own[sizeof(Arguments)];
    __builtin_memcpy(own, words, sizeof own);
    function(*reinterpret_cast<Arguments*>(own));
  }
  static constexpr Kernel kernel = {run, sizeof(Arguments)};
};

}  // namespace on_cpu

inline unsigned char* dynamic_smem() { return on_cpu::smem; }
