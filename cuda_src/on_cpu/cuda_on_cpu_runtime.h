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

enum class WarpCall : unsigned char { syncwarp, shfl, shfl_xor, ballot };

// Waits until every lane of `mask` has made the same call; `word` is what this lane gives to the
// others.
unsigned long long warp_call(WarpCall call, unsigned mask, unsigned long long word, unsigned lane,
                             int width);
void block_barrier();
void yield();

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
                  unsigned rank);  // st.async

// What tensor_tile.cuh and warpgroup.cuh call. words: of a matrix of 2-byte elements: its address,
// columns, rows, bytes from row to row, then the columns and rows of a tile. blocks: of the
// cluster, a bit each.
void tile_load(void* smem, const unsigned long long* words, int col, int row,
               unsigned long long* barrier, unsigned blocks);
// wgmma.mma_async m64n256k16, computed as late as a GPU may: when it is waited for. So a stage that
// is given back too early gives wrong results. a: null where the 64 rows are in shared memory, at
// x.
void multiply(float* sums, const unsigned* a, unsigned long long x, unsigned long long weight,
              bool adds, bool is_bfloat16);
void products_commit();
void products_wait(unsigned pending_groups);

// Addresses of shared memory as the GPU has them: dynamic memory begins at byte 1024.
inline constexpr unsigned first_smem_address = 1024;
inline unsigned smem_address(const void* pointer) {
  return first_smem_address + unsigned(static_cast<const unsigned char*>(pointer) - smem);
}

struct Kernel {
  void (*run)(const void* words);
  unsigned num_bytes;  // of the argument struct
};

}  // namespace on_cpu
