// split_sums -- sums of wdy * x_hat and of wdy over one rank's part of a row; a block owns a row
// owns:  the part of x in registers; path uncached: nothing
// moves: x and dy once in, two numbers a row out (RMSNorm: one)
// takes: any row of at least one column
// needs: num_cols and all row strides multiples of pack_size, addresses aligned to a pack
#include "backward.cuh"
#include "split_rows.cuh"

// wdy = dy * weight. The sums over all ranks are what split_gradients.cu needs of other ranks.
template <class X, class Dy, class LoadWeight, bool centered>
struct SplitSums {
  using Compute = typename Load<X>::Compute;
  Load<X> x;
  Load<Dy> dy;
  LoadWeight load_weight;
  SavedStatistics<Compute, centered> saved;
  Compute* sums;  // [of wdy * x_hat, of wdy][num_rows]; RMSNorm: the first alone
  long long num_rows;
  long long num_cols;
};

template <class X, class Dy, class LoadWeight, bool centered, Tile tile>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm)
    split_sums(const SplitSums<X, Dy, LoadWeight, centered> call) {
  using Compute = typename Load<X>::Compute;
  BlockReduce<tile.threads_per_row, Compute> reduce(dynamic_smem());

  for (long long row = blockIdx.x; row < call.num_rows; row += gridDim.x) {
    auto x_of_row = part_of_row<tile>(call.x, row, call.num_cols);
    const RowStatistics<Compute> statistics = call.saved.load(row, call.num_rows);
    Sum<Compute, 2> sums{};
    const auto load_dy = [&](long long col) {
      return call.dy.template load<tile.pack_size>(row, col);
    };
    x_of_row.for_each_pack_with(
        load_dy, [&](long long col, const auto& xs, bool in_row, const auto& dy) {
          Compute x_hats[tile.pack_size], dys[tile.pack_size], weights[tile.pack_size];
          statistics.template normalize<centered>(xs, x_hats);
          unpack(dy, dys);
          call.load_weight.load(in_row ? col : 0, weights);
          Sum<Compute, 2> of_pack{};
#pragma unroll
          for (int at = 0; at < tile.pack_size; ++at) {
            const Compute wdy = in_row ? rounded_product(dys[at], weights[at]) : Compute(0);
            of_pack.part[0] += wdy * x_hats[at];
            of_pack.part[1] += wdy;
          }
          sums.merge(of_pack);
        });
    sums = reduce.all(sums);
    if (threadIdx.x == 0) {
      call.sums[row] = sums.part[0];
      if constexpr (centered) call.sums[call.num_rows + row] = sums.part[1];
    }
  }
}
