// forward_uncached -- y = (x - mean) * rstd * weight + bias; a block owns a row that fits nowhere
// owns:  only sums: the row is not kept, each pass reads it again. Two passes; with two_pass
//        statistics of LayerNorm three
// moves: num_cols * (2 or 3 * itemsize of x + itemsize of y) bytes a row
// takes: any row
// needs: num_cols and all row strides multiples of pack_size, addresses aligned to a pack
#include "forward.cuh"
#include "uncached_row.cuh"

// Load reads x, Store writes y (load.cuh, store.cuh). centered: LayerNorm, else RMSNorm. All
// threads of a block share a row: thread t takes packs t, t + threads_per_row, ... of pack_size
// elements each.
template <class Load, class Store, bool centered, Statistics statistics, Tile tile>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm)
    forward_uncached(const Forward<Load, Store> call) {
  using Compute = typename Load::Compute;
  auto carried = call.template start<tile>();  // nothing, unless y has 8 bits
  BlockReduce<tile.threads_per_row, Compute> reduce(dynamic_smem());  // sums over the block

  for (long long row = blockIdx.x; row < call.num_rows; row += gridDim.x) {
    UncachedRow<Load, tile> values{call.load, row, call.num_cols};
    // The first pass, or two: every thread gets mean and rstd of the row.
    const auto mean_rstd =
        row_statistics<centered, statistics, Compute>(values, reduce, call.num_cols, call.eps);
    // The last pass: reads x again, applies weight and bias, writes y. Thread 0 also writes mean
    // and rstd.
    call.template write<centered>({row, threadIdx.x == 0}, values, mean_rstd, reduce, carried);
  }
  call.finish(carried);
}
