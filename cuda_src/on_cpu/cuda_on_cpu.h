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
#include "matrix_calls.h"
#include "warp_calls.h"

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
