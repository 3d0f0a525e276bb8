// backward.cuh -- the argument of every backward kernel, and the gradient of one row
//
// With x_hat = (x - mean) * rstd and wdy = dy * weight:
//   dx = rstd * (wdy - x_hat * mean(wdy * x_hat) - mean(wdy))     (RMSNorm: without the last term)
//   dweight = sum over rows of dy * x_hat,  dbias = sum over rows of dy
#pragma once
#include "load_store.cuh"
#include "row.cuh"
#include "statistics.cuh"

template <class LoadX, class LoadDy, class Scale, class StoreDx>
struct Backward {
  using Compute = typename LoadX::Compute;

  LoadX load_x;
  LoadDy load_dy;
  Scale scale;
  StoreDx store;
  const Compute* mean;  // [num_rows]; null in RMSNorm, and if load_x gives x_hat
  const Compute* rstd;  // [num_rows]
  // One partial row of sums for each block (each cluster): [grid_size / cluster_size, num_cols], null if not wanted.
  Compute* dweight_partials;
  Compute* dbias_partials;
  long long num_rows;
  long long num_cols;
};

// dy * weight, rounded: were the product fused into the difference that follows, a row of one column would not get exactly 0.
__device__ __forceinline__ float times(float dy, float weight) { return __fmul_rn(dy, weight); }
__device__ __forceinline__ double times(double dy, double weight) { return __dmul_rn(dy, weight); }

// normalized: what is loaded is x_hat itself.
template <class Compute, bool normalized = false>
struct RowGradient {
  Compute mean;
  Compute rstd;
  Compute mean_wdy;
  Compute mean_wdy_x_hat;

  template <bool centered>
  __device__ __forceinline__ Compute x_hat(Compute x) const {
    if constexpr (normalized) return x;
    if constexpr (centered) return (x - mean) * rstd;
    return x * rstd;
  }

  // sums: of wdy * x_hat and of wdy over the row; reciprocal: of num_cols
  __device__ __forceinline__ void finish(const Sum<Compute, 2>& sums, Compute reciprocal) {
    mean_wdy_x_hat = sums.part[0] * reciprocal;
    mean_wdy = sums.part[1] * reciprocal;
  }

  // The differences first, then the scale: a row of one column has exactly no gradient.
  template <bool centered>
  __device__ __forceinline__ Compute dx(Compute x_hat, Compute wdy) const {
    if constexpr (centered) return ((wdy - mean_wdy) - x_hat * mean_wdy_x_hat) * rstd;
    return (wdy - x_hat * mean_wdy_x_hat) * rstd;
  }
};

// sums[...] += values, in shared memory; the thread owns the pack.
template <class Compute, int pack_size>
__device__ __forceinline__ void add_pack(Compute* sums, const Compute (&values)[pack_size]) {
  Compute added[pack_size];
  unpack(load_pack<pack_size>(sums), added);
#pragma unroll
  for (int at = 0; at < pack_size; ++at) added[at] += values[at];
  store_pack<pack_size>(sums, repack<Compute>(added));
}

// Writes a pack of y again, for rows whose weights and biases wait nowhere.
template <bool centered, int pack_size, class Problem, class Gradient, class Compute>
__device__ __forceinline__ void recompute(const Problem& problem, const Gradient& gradient, long long row, long long col,
                                          const Compute (&xs)[pack_size], const Compute (&weights)[pack_size]) {
  Compute x_hats[pack_size], biases[pack_size];
#pragma unroll
  for (int at = 0; at < pack_size; ++at) x_hats[at] = gradient.template x_hat<centered>(xs[at]);
  problem.store.biases().load(col, biases);
  problem.store.recompute(row, col, x_hats, weights, biases);
}
