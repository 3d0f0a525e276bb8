// forward_uncached -- y = (x - mean) * rstd * weight + bias; a block owns a row that fits nowhere
// owns:  nothing but sums: welford reads the row twice, two_pass three times; RMSNorm twice
// moves: num_cols * (2 or 3 * itemsize of x + itemsize of y) bytes a row
// takes: any row
// needs: num_cols and all row strides multiples of pack_size, addresses aligned to a pack
#include "forward.cuh"

template <class Load, class Store, bool centered, Statistics statistics, Tile tile>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm) forward_uncached(const Forward<Load, Store> problem) {
  using Compute = typename Load::Compute;
  auto carried = problem.template start<tile>();
  BlockReduce<tile.threads_per_row, Compute> reduce(dynamic_smem());

  for (long long row = blockIdx.x; row < problem.num_rows; row += gridDim.x) {
    GlobalRow<Load, tile> values{problem.load, row, problem.num_cols};
    const auto found = row_statistics<centered, statistics, Compute>(values, reduce, problem.num_cols, problem.eps);
    problem.template write<centered>(row, values, found, reduce, threadIdx.x == 0, carried);
  }
  problem.finish(carried);
}
