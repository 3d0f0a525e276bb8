// uncached_row.cuh -- a row that is kept nowhere: each pass reads it; and what every row offers
//
// Every row has these members, for row_statistics and for the writing of results:
//   for_each_pack(f)               f(col, values) for each pack of this thread, in a fixed order
//   for_each_pack_padded(f)        f(col, values, in_row), also for packs beyond the row, whose
//                                  values are arbitrary. f selects; a branch would keep packs from
//                                  overlapping
//   for_each_pack_with(load, f)    f(col, values, in_row, load(col)); may call load one pack ahead
//   pack_size, and the constants   as below
//
// Other rows: register_row.cuh, smem_row.cuh, forward_ring.cuh.
#pragma once
#include "load.cuh"
#include "tile.cuh"

template <class Load, Tile tile>
struct UncachedRow {
  using Compute = typename Load::Compute;
  static constexpr int pack_size = tile.pack_size;
  // Whether float sums are exact: of as many values of one magnitude as the row has, and of as many
  // equal values. Those of 2^13 equal packs of float16 are: a value has 11 bits, and 11 + 13 is 24.
  static constexpr bool has_exact_sums = false, adds_equals_exactly = false;
  // Packs of a thread if PackSums (reduce.cuh) adds them in pairs, else 0.
  static constexpr int num_summed_packs = 0;
  // Packs of results that a thread can keep in registers as well, or 0.
  static constexpr int num_kept_results = 0;

  const Load& load;
  long long row;
  long long num_cols;
  bool first_pass = true;

  // The first value of the row: deviations from it are small where the mean is large, and 0 in a
  // constant row, whose mean is then exact.
  __device__ __forceinline__ Compute origin() const {
    return usable_origin(load_one(load, row, 0));
  }
  template <class F>
  __device__ __forceinline__ void for_each_pack(F f) {
    const long long step = static_cast<long long>(tile.threads_per_row) * pack_size;
    for (long long col = static_cast<long long>(threadIdx.x) * pack_size; col < num_cols;
         col += step) {
      Compute values[pack_size];
      // Only the first pass may have a side effect, such as writing the sum of x and a residual.
      if (first_pass) {
        unpack(load.template load<pack_size>(row, col), values);
      } else {
        unpack(reload<pack_size>(load, row, col), values);
      }
      f(col, values);
    }
    first_pass = false;
  }
  template <class F>
  __device__ __forceinline__ void for_each_pack_padded(F f) {
    for_each_pack([&](long long col, const auto& values) { f(col, values, true); });
  }
  template <class LoadMore, class F>
  __device__ __forceinline__ void for_each_pack_with(LoadMore load_more, F f) {
    for_each_pack([&](long long col, const auto& values) { f(col, values, true, load_more(col)); });
  }
};
