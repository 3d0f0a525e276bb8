// x_hat_load.cuh -- the load of a backward that has kept y instead of x
#pragma once
#include "parameter.cuh"

// x_hat = (y - bias) / weight. A weight smaller than `smallest` counts as `smallest`, with its
// sign: y then has lost more digits of x_hat than it holds.
template <class Y, class Weight, class Bias, bool zero_centered, class C>
struct LoadXHat {
  using Held = C;
  using Compute = C;
  static constexpr bool has_effect = false;
  static constexpr bool normalized = true;

  const Y* y;
  long long y_stride;
  const Weight* weight;
  const Bias* bias;
  double smallest;

  template <int pack_size>
  __device__ __forceinline__ Pack<C, pack_size> load(long long row, long long col) const {
    C values[pack_size], weights[pack_size], biases[pack_size];
    unpack(load_pack<pack_size>(y + row * y_stride + col), values);
    KeptParameter<Weight, zero_centered, pack_size>(weight, col).unpack_to(weights, 1.0f);
    KeptParameter<Bias, false, pack_size>(bias, col).unpack_to(biases, 0.0f);
#pragma unroll
    for (int at = 0; at < pack_size; ++at) {
      const C least = static_cast<C>(smallest);
      const C divisor = weights[at] >= least || weights[at] <= -least ? weights[at]
                        : weights[at] < 0                             ? -least
                                                                      : least;
      values[at] = (values[at] - biases[at]) / divisor;
    }
    return repack<C>(values);
  }
};
