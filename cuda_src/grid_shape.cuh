// grid_shape.cuh -- which rows, columns, registers and shared memory a block of path `grid` has
//
// cluster_size blocks share a row: a group. All groups of the launch are resident at once, and each
// takes every num_groups-th row. A block's first warps work; the others exchange sums
// (grid_exchange.cuh).
#pragma once
#include "slice.cuh"

template <Tile tile>
struct GridShape {
  static constexpr int num_blocks = tile.cluster_size;
  static constexpr int num_exchangers = 4;
  static constexpr int num_warps = tile.threads_per_row / 32 - num_exchangers;  // that work
  static constexpr int num_workers = 32 * num_warps;
  static constexpr int step = num_workers * tile.pack_size;

  // Registers of a thread for what it keeps from row to row: all but those for one row at a time.
  static constexpr int spare_registers = 512 / ((tile.block_size() + 127) / 128) / 8 * 8 - 80;
  static constexpr int smem_bytes = 227 * 1024;

  __device__ __forceinline__ static bool works() { return threadIdx.x < num_workers; }
  __device__ __forceinline__ static unsigned rank() { return blockIdx.x % num_blocks; }
  __device__ __forceinline__ static unsigned group() { return blockIdx.x / num_blocks; }
  __device__ __forceinline__ static unsigned num_groups() { return gridDim.x / num_blocks; }
  __device__ __forceinline__ static long long row(long long turn) {
    return group() + turn * num_groups();
  }
  __device__ __forceinline__ static long long num_turns(long long num_rows) {
    return (num_rows - group() + num_groups() - 1) / num_groups();
  }
  __device__ __forceinline__ static Slice cols(long long num_cols) {
    return slice<tile>(static_cast<int>(num_cols), rank());
  }
  // The columns of a slice that this thread's warp has.
  __device__ __forceinline__ static int cols_of_warp(Slice cols) {
    constexpr int of_warp = 32 * tile.pack_size;
    const int before = static_cast<int>(threadIdx.x) / 32 * of_warp;
    return cols.size() / step * of_warp + max(0, min(cols.size() % step - before, of_warp));
  }
};
