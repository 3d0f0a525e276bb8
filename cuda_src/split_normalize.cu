// split_normalize -- y of one rank's columns, by statistics of the whole row; a block owns a row
// owns:  the part in registers; path uncached: nothing
// moves: x once in, y once out; three numbers a row and rank in, three a row out (RMSNorm: one)
// takes: any row of at least one column
// needs: num_cols and all row strides multiples of pack_size, addresses aligned to a pack; rank r
//        has columns [r * cols_of_rank, (r + 1) * cols_of_rank) of the whole row, the last ranks
//        fewer or none, rank 0 at least one
#include "split_rows.cuh"
#include "store.cuh"

template <class X, class Store, bool centered>
struct SplitNormalize {
  using Compute = typename Load<X>::Compute;
  Load<X> x;
  Store store;
  const Compute* parts;  // [num_ranks], of each what split_statistics.cu wrote
  SavedStatistics<Compute, centered> saved;
  long long num_rows;
  long long num_cols;
  long long cols_of_row;
  long long cols_of_rank;
  long long num_ranks;
  double eps;

  __device__ __forceinline__ Compute part(long long rank, int which, long long row) const {
    return parts[(rank * (centered ? 3 : 1) + which) * num_rows + row];
  }
  __device__ __forceinline__ Compute count_of(long long rank) const {
    return static_cast<Compute>(max(min(cols_of_row - rank * cols_of_rank, cols_of_rank), 0LL));
  }

  // The statistics of a whole row from its parts (Chan, Golub, LeVeque 1983), in the order of
  // ranks, so that every rank has the same bits. Means are compared with that of rank 0: equal ones
  // give exactly that mean.
  __device__ __forceinline__ RowStatistics<Compute> combine(long long row, Compute& rest) const {
    const Compute count = static_cast<Compute>(cols_of_row), reciprocal = Compute(1) / count;
    const Compute origin = part(0, 0, row);
    const auto offset = [&](long long rank) {
      return part(rank, 0, row) - origin + part(rank, 1, row);
    };
    Compute shift = 0, squares = 0;
    for (long long rank = 0; rank < num_ranks; ++rank) shift += count_of(rank) * offset(rank);
    shift = divide(shift, count, reciprocal);
    for (long long rank = 0; rank < num_ranks; ++rank) {
      const Compute apart = offset(rank) - shift;
      squares += part(rank, 2, row) + count_of(rank) * apart * apart;
    }
    // origin + shift, rounded, and its rounding error (Knuth's two-sum).
    const Compute mean = origin + shift, added = mean - origin;
    rest = (origin - (mean - added)) + (shift - added);
    const Compute rstd = rsqrt_rounded(squares * reciprocal + static_cast<Compute>(eps));
    return {mean, rstd, mean, -rest * rstd};
  }
  __device__ __forceinline__ RowStatistics<Compute> combine_and_save(long long row) const {
    const bool saves = threadIdx.x == 0;
    if constexpr (centered) {
      Compute rest;
      const RowStatistics<Compute> statistics = combine(row, rest);
      if (saves) saved.save(row, num_rows, rest, statistics);
      return statistics;
    } else {
      Compute squares = 0;
      for (long long rank = 0; rank < num_ranks; ++rank) squares += part(rank, 0, row);
      const auto statistics =
          uncentered(squares, Compute(1) / static_cast<Compute>(cols_of_row), eps);
      if (saves) saved.save(row, num_rows, 0, statistics);
      return statistics;
    }
  }
};

// combines: from parts; else the statistics are those that an earlier launch saved.
template <class X, class Store, bool centered, bool combines, Tile tile>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm)
    split_normalize(const SplitNormalize<X, Store, centered> call) {
  using Compute = typename Load<X>::Compute;
  for (long long row = blockIdx.x; row < call.num_rows; row += gridDim.x) {
    auto values_of_row = part_of_row<tile>(call.x, row, call.num_cols);
    const RowStatistics<Compute> statistics =
        combines ? call.combine_and_save(row) : call.saved.load(row, call.num_rows);
    const auto keep = [&](long long col) { return call.store.template keep<tile.pack_size>(col); };
    values_of_row.for_each_pack_with(
        keep, [&](long long col, const auto& values, bool in_row, const auto& kept) {
          Compute normalized[tile.pack_size];
          statistics.template normalize<centered>(values, normalized);
          call.store.store(row, col, normalized, kept, in_row);
        });
  }
}
