// forward_warp -- y = (x - mean) * rstd * weight + bias; a warp, or 2 to 16 lanes of one, owns a row
// owns:  each lane keeps packs_per_thread packs of its row in registers; a block works on rows_per_block rows at a time
// moves: x once in, y once out: num_cols * (itemsize of x + itemsize of y) bytes a row
// takes: num_cols <= pack_size * threads_per_row * packs_per_thread; wider rows: forward_block.cu
// needs: num_cols and all row strides multiples of pack_size, addresses aligned to a pack; whole warps in a block
#include "forward.cuh"

template <class Load, class Store, bool centered, Statistics statistics, Tile tile>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm) forward_warp(const Forward<Load, Store> problem) {
  using Compute = typename Load::Compute;
  problem.start();
  WarpReduce<tile.threads_per_row> reduce;
  const long long step = static_cast<long long>(gridDim.x) * tile.rows_per_block;

  for (long long first = static_cast<long long>(blockIdx.x) * tile.rows_per_block; first < problem.num_rows; first += step) {
    const long long row = first + threadIdx.x / tile.threads_per_row;
    // Lanes beyond the last row take part in the shuffles of their warp with a row that others own, and write nothing.
    const bool present = row < problem.num_rows;
    RegisterRow<Load, tile> values;
    values.fetch(problem.load, present ? row : problem.num_rows - 1, {0, static_cast<int>(problem.num_cols)});
    const auto found = row_statistics<centered, statistics, Compute>(values, reduce, problem.num_cols, problem.eps);
    problem.template write<centered>(row, values, found, reduce, threadIdx.x % tile.threads_per_row == 0, present);
  }
}
