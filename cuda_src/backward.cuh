// backward.cuh -- the argument of every backward kernel, and the gradient of one row
//
// With x_hat = (x - mean) * rstd and wdy = dy * weight:
//   dx = rstd * (wdy - x_hat * mean(wdy * x_hat) - mean(wdy))     (RMSNorm: without the last term)
//   dweight = sum over rows of dy * x_hat,  dbias = sum over rows of dy
#pragma once
#include "backward_stores.cuh"
#include "load.cuh"
#include "statistics.cuh"
#include "threads.cuh"

// The gradient of one row.
template <class Compute>
struct RowGradient {
  Compute mean;
  Compute rstd;
  Compute mean_wdy;
  Compute mean_wdy_x_hat;

  template <bool centered>
  __device__ __forceinline__ Compute x_hat(Compute x) const {
    if constexpr (centered) return (x - mean) * rstd;
    return x * rstd;
  }

  // Adds a pack to the row's sums of wdy * x_hat and of wdy.
  template <bool centered, int pack_size>
  __device__ __forceinline__ void add_to(Sum<Compute, 2>& sums, const Compute (&xs)[pack_size],
                                         const Compute (&dys)[pack_size],
                                         const Compute (&weights)[pack_size]) const {
#pragma unroll
    for (int at = 0; at < pack_size; ++at) {
      const Compute wdy = rounded_product(dys[at], weights[at]);
      sums.part[0] += wdy * x_hat<centered>(xs[at]);
      if constexpr (centered) sums.part[1] += wdy;
    }
  }
  // sums: of the whole row; reciprocal: of num_cols. Then dx can be computed.
  __device__ __forceinline__ void finish(const Sum<Compute, 2>& sums, Compute reciprocal) {
    mean_wdy_x_hat = rounded_product(sums.part[0], reciprocal);
    mean_wdy = rounded_product(sums.part[1], reciprocal);
  }

  // The differences first, then the scale, so that a row of one column gets exactly 0.
  template <bool centered>
  __device__ __forceinline__ Compute dx(Compute x_hat, Compute wdy) const {
    if constexpr (centered) return ((wdy - mean_wdy) - x_hat * mean_wdy_x_hat) * rstd;
    return (wdy - x_hat * mean_wdy_x_hat) * rstd;
  }
  template <bool centered, int pack_size>
  __device__ __forceinline__ void dx_of_pack(Compute (&dxs)[pack_size],
                                             const Compute (&xs)[pack_size],
                                             const Compute (&dys)[pack_size],
                                             const Compute (&weights)[pack_size]) const {
#pragma unroll
    for (int at = 0; at < pack_size; ++at)
      dxs[at] = dx<centered>(x_hat<centered>(xs[at]), rounded_product(dys[at], weights[at]));
  }
};

template <class LoadX, class LoadDy, class LoadWeight, class StoreDx>
struct Backward {
  using Compute = typename LoadX::Compute;

  LoadX load_x;
  LoadDy load_dy;
  LoadWeight load_weight;
  StoreDx store;
  const Compute* mean;  // [num_rows]; null in RMSNorm
  const Compute* rstd;  // [num_rows]
  // One partial row of sums for each block or cluster: [grid_size / cluster_size, num_cols]; null:
  // not wanted.
  Compute* dweight_partials;
  Compute* dbias_partials;
  long long num_rows;
  long long num_cols;

  // The gradient of a row, before its sums are known.
  template <bool centered>
  __device__ __forceinline__ RowGradient<Compute> gradient_of(long long row) const {
    return {centered ? mean[row] : Compute(0), rstd[row], 0, 0};
  }

  // Writes a pack of dx, of a kernel that has not loaded what is added to it.
  template <int pack_size>
  __device__ __forceinline__ void store_dx(long long row, long long col,
                                           const Compute (&dx)[pack_size]) const {
    store.store(row, col, dx, store.template load_added<pack_size>(row, col), true);
  }
  // Writes a pack of y again, of which the gradient's row has the statistics.
  template <bool centered, int pack_size, class Gradient>
  __device__ __forceinline__ void recompute(const Gradient& gradient, long long row, long long col,
                                            const Compute (&xs)[pack_size],
                                            const Compute (&weights)[pack_size],
                                            const Compute (&biases)[pack_size],
                                            bool present = true) const {
    Compute x_hats[pack_size];
#pragma unroll
    for (int at = 0; at < pack_size; ++at) x_hats[at] = gradient.template x_hat<centered>(xs[at]);
    store.recompute(row, col, x_hats, weights, biases, present);
  }
};

// Adds a pack to its columns' sums of dweight and dbias. Returns its sums of wdy * x_hat and of
// wdy. A pack that is not present adds zeros.
template <Gradients gradients, bool centered, int pack_size, class Compute>
__device__ __forceinline__ Sum<Compute, 2> sum_pack(
    Compute (&dweight)[pack_size], Compute (&dbias)[pack_size], const Compute (&xs)[pack_size],
    const Compute (&dys)[pack_size], const Compute (&weights)[pack_size],
    const RowGradient<Compute>& gradient, bool present) {
  Sum<Compute, 2> sums{};
#pragma unroll
  for (int at = 0; at < pack_size; ++at) {
    const Compute dy = present ? dys[at] : Compute(0);
    const Compute x_hat = present ? gradient.template x_hat<centered>(xs[at]) : Compute(0);
    if constexpr (gradients.dweight) dweight[at] += dy * x_hat;
    if constexpr (gradients.dbias) dbias[at] += dy;
    if constexpr (gradients.dx) {
      const Compute wdy = rounded_product(dy, weights[at]);
      sums.part[0] += wdy * x_hat;
      if constexpr (centered) sums.part[1] += wdy;
    }
  }
  return sums;
}

// The paths on which several rows are under way, each in a header of its name. An instance that has
// one includes it (cupynorm/gpu/nvrtc.py). backward_few.cu has a ring of its own.
template <Gradients gradients, bool centered, Tile tile, class LoadX, class LoadDy,
          class LoadWeight, class StoreDx>
__device__ __forceinline__ void backward_bundle(
    const Backward<LoadX, LoadDy, LoadWeight, StoreDx>& call);
template <Gradients gradients, bool centered, Tile tile, class LoadX, class LoadDy,
          class LoadWeight, class StoreDx>
__device__ __forceinline__ void backward_ring(
    const Backward<LoadX, LoadDy, LoadWeight, StoreDx>& call);
template <bool centered, Tile tile, class LoadX, class LoadDy, class LoadWeight, class StoreDx>
__device__ __forceinline__ void backward_few_ring(
    const Backward<LoadX, LoadDy, LoadWeight, StoreDx>& call);
