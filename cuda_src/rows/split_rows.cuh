// split_rows.cuh -- one rank's part of a row whose columns are on several ranks
#pragma once
#include "load.cuh"
#include "register_row.cuh"
#include "statistics.cuh"
#include "uncached_row.cuh"

// A rank's part in the registers of a block. It has an origin, as UncachedRow has: then the mean of
// a constant row is exact on each rank, and so is that of all.
template <class Load, Tile tile>
struct PartInRegisters : RegisterRow<Load, tile> {
  static constexpr bool has_exact_sums = false, adds_equals_exactly = false;
  typename Load::Compute first_value;

  __device__ __forceinline__ typename Load::Compute origin() const { return first_value; }
};

template <Tile tile, class Load>
__device__ __forceinline__ auto part_of_row(const Load& load, long long row, long long num_cols) {
  const UncachedRow<Load, tile> uncached{load, row, num_cols};
  if constexpr (tile.path == Path::uncached) {
    return uncached;
  } else {
    PartInRegisters<Load, tile> part;
    part.fetch(load, row, {0, static_cast<int>(num_cols)});
    part.first_value = uncached.origin();
    return part;
  }
}

// The statistics of whole rows, as split_normalize.cu saves them: [mean, rest, rstd][num_rows],
// where mean + rest is the mean to more digits than one number holds. RMSNorm: [rstd][num_rows].
template <class Compute, bool centered>
struct SavedStatistics {
  Compute* of_rows;

  __device__ __forceinline__ RowStatistics<Compute> load(long long row, long long num_rows) const {
    if constexpr (!centered) return {0, of_rows[row], 0, 0};
    const Compute mean = of_rows[row], rest = of_rows[num_rows + row];
    const Compute rstd = of_rows[2 * num_rows + row];
    return {mean, rstd, mean, -rest * rstd};
  }
  __device__ __forceinline__ void save(long long row, long long num_rows, Compute rest,
                                       const RowStatistics<Compute>& mean_rstd) const {
    of_rows[(centered ? 2 : 0) * num_rows + row] = mean_rstd.rstd;
    if constexpr (centered) of_rows[row] = mean_rstd.first, of_rows[num_rows + row] = rest;
  }
};
