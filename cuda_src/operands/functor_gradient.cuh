// functor_gradient.cuh -- the gradient of a user's own functor, in the loads and stores of backward
//
// The user's lines become a struct that is compiled with the kernel (cupynorm/plan/functors.py):
//   apply(row, col, values, gradients, other, other_gradient)   values: what f was applied to, a
//       pack; gradients: of f's result, and on return of f's argument. It also writes the gradients
//       of f's arrays. Several threads may write the same values to one place.
//
// DyThroughStore   the load of dy, where forward's store has f: the gradient of y from that of f(y)
// DxThroughLoad    part of SplitStore, where forward's load has f: that of x from that of f(x)
#pragma once
#include "functor.cuh"
#include "parameter.cuh"

template <class LoadX, class Dy, class Weight, class Bias, bool zero_centered, bool centered,
          class Functor>
struct DyThroughStore {
  using Compute = typename LoadX::Compute;
  using Held = Compute;
  static constexpr bool has_effect = false;

  LoadX load_x;
  const Dy* dy;
  long long dy_stride;
  const Weight* weight;
  const Bias* bias;
  const Compute* mean;
  const Compute* rstd;
  Functor functor;

  // y before f, from x and the statistics of its row.
  template <int pack_size>
  __device__ __forceinline__ void compute_y(long long row, long long col,
                                            Compute (&y)[pack_size]) const {
    Compute weights[pack_size], biases[pack_size];
    unpack(reload<pack_size>(load_x, row, col), y);
    KeptParameter<Weight, zero_centered, pack_size>(weight, col).unpack_to(weights, 1.0f);
    KeptParameter<Bias, false, pack_size>(bias, col).unpack_to(biases, 0.0f);
    Compute row_mean = 0;
    if constexpr (centered) row_mean = mean[row];
    const Compute row_rstd = rstd[row];
#pragma unroll
    for (int at = 0; at < pack_size; ++at)
      y[at] = (y[at] - row_mean) * row_rstd * weights[at] + biases[at];
  }

  template <int pack_size>
  __device__ __forceinline__ Pack<Held, pack_size> load(long long row, long long col) const {
    const Dy* row_start = dy + row * dy_stride;
    Compute y[pack_size], gradients[pack_size];
    compute_y(row, col, y);
    unpack(load_pack<pack_size>(row_start + col), gradients);
    const auto other_y = [&](long long at) {
      Compute value[1];
      compute_y(row, at, value);
      return value[0];
    };
    functor.apply(row, col, y, gradients, other_y, OtherX<Dy, Compute>{row_start});
    return repack<Held>(gradients);
  }
};

template <class X, class Functor>
struct DxThroughLoad {
  const X* x;
  long long x_stride;
  Functor functor;

  template <int pack_size, class Compute>
  __device__ __forceinline__ void apply(long long row, long long col,
                                        Compute (&gradients)[pack_size], bool present) const {
    if (!present) return;  // x has no such row or column
    const X* row_start = x + row * x_stride;
    Compute values[pack_size];
    unpack(load_pack<pack_size>(row_start + col), values);
    // Gradients of other columns are not known yet.
    functor.apply(row, col, values, gradients, OtherX<X, Compute>{row_start}, Nothing{});
  }
};
