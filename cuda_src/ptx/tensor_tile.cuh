// tensor_tile.cuh -- PTX for tiles of matrices, which the copy engine moves (sm_90), with C++ twins
//
// tile_fetch_map(map)                       early: brings a map to its cache
// tile_load(smem, map, col, row, barrier)   a tile from (row, col), 0 outside of the matrix, whose
//                                           bytes the barrier counts
// tile_load_to_both(...)                    the same into both blocks of a cluster, to each barrier
// arrive_in(barrier, rank)                  one arrival at the barrier of a block of the cluster
// tiles_smem()                              dynamic_smem(), 1024-byte aligned; all else: one thread
#pragma once
#include "bulk.cuh"

// CUtensorMap: a matrix in global memory, the size of a tile, and its layout in shared memory.
struct alignas(64) TensorMap {
  unsigned long long word[16];
};

#ifdef CUPYNORM_ON_CPU

__device__ __forceinline__ void tile_fetch_map(const TensorMap&) {}
__device__ __forceinline__ void tile_load(void* smem, const TensorMap& map, int col, int row,
                                          unsigned long long* barrier) {
  on_cpu::tile_load(smem, map.word, col, row, barrier, 1u << on_cpu::cluster_rank());
}
__device__ __forceinline__ void tile_load_to_both(void* smem, const TensorMap& map, int col,
                                                  int row, unsigned long long* barrier) {
  on_cpu::tile_load(smem, map.word, col, row, barrier, 3);
}
__device__ __forceinline__ void arrive_in(unsigned long long* barrier, unsigned rank) {
  on_cpu::mbarrier_remote_arrive(barrier, rank);
}
__device__ __forceinline__ unsigned char* tiles_smem() { return dynamic_smem(); }

#else

__device__ __forceinline__ void tile_fetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
__device__ __forceinline__ void tile_load(void* smem, const TensorMap& map, int col, int row,
                                          unsigned long long* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(smem_address(smem)),
      "l"(&map), "r"(col), "r"(row), "r"(smem_address(barrier))
      : "memory");
}
__device__ __forceinline__ void tile_load_to_both(void* smem, const TensorMap& map, int col,
                                                  int row, unsigned long long* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(smem_address(smem)),
      "l"(&map), "r"(col), "r"(row), "r"(smem_address(barrier)), "h"(static_cast<unsigned short>(3))
      : "memory");
}
// It has no .release.cluster, which would put a fence of the whole GPU into the main loop. It need
// only order reads of shared memory, whose values have arrived.
__device__ __forceinline__ void arrive_in(unsigned long long* barrier, unsigned rank) {
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(smem_address(barrier)),
      "r"(rank)
      : "memory");
}
__device__ __forceinline__ unsigned char* tiles_smem() {
  extern __shared__ __align__(1024) unsigned char tiles[];
  return tiles;
}

#endif
