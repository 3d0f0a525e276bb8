// split_statistics -- mean, rest and M2 of one rank's part of a row; a block owns a row
// owns:  the part in registers; path uncached: nothing, each of three passes reads it again
// moves: x once in (uncached: twice or three times); three numbers a row out, RMSNorm one
// takes: any row of at least one column
// needs: num_cols and the row stride multiples of pack_size, addresses aligned to a pack
#include "split_rows.cuh"

// mean + rest is the mean to more digits than one number holds. M2 = sum of (x - mean)^2.
// split_normalize.cu combines the numbers of all ranks.
template <class X>
struct SplitStatistics {
  Load<X> x;
  typename Load<X>::Compute* part;  // [mean, rest, M2][num_rows]; RMSNorm: [sum of squares][...]
  long long num_rows;
  long long num_cols;
};

template <class X, bool centered, Tile tile>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm)
    split_statistics(const SplitStatistics<X> call) {
  using Compute = typename Load<X>::Compute;
  BlockReduce<tile.threads_per_row, Compute> reduce(dynamic_smem());
  // The smallest eps: rstd is finite, and 1 / rstd^2 is the variance, or RMSNorm's mean square.
  constexpr double eps = 0x1p-126;

  for (long long row = blockIdx.x; row < call.num_rows; row += gridDim.x) {
    auto part = part_of_row<tile>(call.x, row, call.num_cols);
    const auto mean_rstd =
        row_statistics<centered, Statistics::two_pass, Compute>(part, reduce, call.num_cols, eps);
    const Compute deviation = Compute(1) / mean_rstd.rstd;
    const Compute squares = deviation * deviation * static_cast<Compute>(call.num_cols);
    if (threadIdx.x == 0) {
      call.part[(centered ? 2 : 0) * call.num_rows + row] = squares;
      if constexpr (centered) {
        call.part[row] = mean_rstd.first;
        // mean_rstd.shift is -rest * rstd. An infinite variance leaves no rest.
        call.part[call.num_rows + row] = mean_rstd.rstd > 0 ? -mean_rstd.shift * deviation : 0;
      }
    }
  }
}
