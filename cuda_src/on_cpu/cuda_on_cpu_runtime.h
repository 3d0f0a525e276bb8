// cuda_on_cpu_runtime.h -- what the kernels of the CPU build and their scheduler have in common
//
// Apart from cuda_on_cpu.h, whose names for arithmetic would clash with the C++ library the
// scheduler uses.
#pragma once

struct uint3 {
  unsigned x, y, z;
};
using dim3 = uint3;

// The scheduler rewrites these at each switch; launches take turns, so plain variables are enough.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

namespace on_cpu {

extern unsigned char* smem;  // dynamic shared memory of the block that is running

enum class WarpCall : unsigned char { syncwarp, shfl, shfl_up, shfl_down, shfl_xor, ballot };

// Waits until every lane of `mask` has made the same call; `word` is what this lane gives to the
// others.
unsigned long long warp_call(WarpCall call, unsigned mask, unsigned long long word, unsigned lane,
                             int width);
void block_barrier();
void yield();
unsigned active_mask();
long long clock();
void trap();

// What threads.cuh calls where the GPU has barrier.cluster and mapa.
unsigned cluster_rank();
unsigned cluster_size();
void cluster_arrive();
void cluster_wait();
void* cluster_map(void* own_smem_pointer, unsigned rank);

// What bulk.cuh calls where the GPU has mbarrier and cp.async.bulk. Copies happen late, at a random
// moment.
void mbarrier_init(unsigned long long* barrier, unsigned count);
void mbarrier_arrive(unsigned long long* barrier);
void mbarrier_expect(unsigned long long* barrier, unsigned bytes);  // arrive.expect_tx
void mbarrier_wait(unsigned long long* barrier, unsigned parity);
void mbarrier_remote_arrive(unsigned long long* own_address, unsigned rank);
void bulk_load(void* smem, const void* global, unsigned bytes, unsigned long long* barrier);
void cluster_send(float* own_address, float value, unsigned long long* own_barrier,
                  unsigned rank);   // st.async
inline void fence_proxy_async() {}  // the CPU has one proxy

struct Kernel {
  void (*run)(const void* words);
  unsigned num_bytes;  // of the argument struct
};

}  // namespace on_cpu
