// parameter_rows.cuh -- the rows whose sums are dweight and dbias
//
// add(row, col, dweights, dbiases) adds a pack of one row to a thread's sums.
#pragma once
#include "backward.cuh"

// Rows of partial sums. A pointer may be null if its gradient is not wanted.
template <class C>
struct PartialSums {
  using Compute = C;
  const Compute* dweight_partials;
  const Compute* dbias_partials;
  long long stride;

  template <bool dweight, bool dbias, int pack_size>
  __device__ __forceinline__ void add(long long row, long long col, Compute (&dweights)[pack_size],
                                      Compute (&dbiases)[pack_size]) const {
    if constexpr (dweight) add_to(dweights, dweight_partials + row * stride + col);
    if constexpr (dbias) add_to(dbiases, dbias_partials + row * stride + col);
  }

 private:
  template <int pack_size>
  __device__ __forceinline__ static void add_to(Compute (&sums)[pack_size],
                                                const Compute* partials) {
    Compute values[pack_size];
    unpack(load_pack<pack_size>(partials), values);
#pragma unroll
    for (int at = 0; at < pack_size; ++at) sums[at] += values[at];
  }
};

// dy * x_hat and dy, computed from the rows themselves.
template <class LoadX, class LoadDy, bool centered>
struct RowProducts {
  using Compute = typename LoadX::Compute;
  LoadX load_x;
  LoadDy load_dy;
  const Compute* mean;
  const Compute* rstd;

  template <bool dweight, bool dbias, int pack_size>
  __device__ __forceinline__ void add(long long row, long long col, Compute (&dweights)[pack_size],
                                      Compute (&dbiases)[pack_size]) const {
    Compute dys[pack_size];
    unpack(load_dy.template load<pack_size>(row, col), dys);
    if constexpr (dweight) {
      Compute xs[pack_size];
      unpack(load_x.template load<pack_size>(row, col), xs);
      RowGradient<Compute> gradient{};
      if constexpr (centered) gradient.mean = mean[row];
      gradient.rstd = rstd[row];
#pragma unroll
      for (int at = 0; at < pack_size; ++at)
        dweights[at] += dys[at] * gradient.template x_hat<centered>(xs[at]);
    }
    if constexpr (dbias) {
#pragma unroll
      for (int at = 0; at < pack_size; ++at) dbiases[at] += dys[at];
    }
  }
};
