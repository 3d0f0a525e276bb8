// slab.cuh -- the rows and columns that one block of reduce_matrix.cu reads
#pragma once
#include "tile.cuh"

// threads_per_row packs of columns of rows_of_slab rows. Blocks with neighbouring numbers share the
// rows. Each of rows_per_block groups of threads takes every rows_per_block-th row,
// packs_per_thread of them at a time.
template <Tile tile>
struct Slab {
  static constexpr int num_groups = tile.rows_per_block;
  static constexpr int step = tile.packs_per_thread * num_groups;
  static constexpr int num_cols = tile.threads_per_row * tile.pack_size;

  long long index;      // of the rows
  long long first_col;  // of the block
  long long first_row, end_row;
  int group, own_col;  // of this thread; own_col from first_col on

  __device__ __forceinline__ Slab(long long rows, long long cols, long long rows_of_slab) {
    const long long blocks_across = (cols + num_cols - 1) / num_cols;
    index = blockIdx.x / blocks_across;
    first_col = blockIdx.x % blocks_across * num_cols;
    first_row = index * rows_of_slab;
    end_row = min(first_row + rows_of_slab, rows);
    group = threadIdx.x / tile.threads_per_row;
    own_col = threadIdx.x % tile.threads_per_row * tile.pack_size;
  }
  __device__ __forceinline__ long long col() const { return first_col + own_col; }
};
