// functor_gradient.cuh -- the gradient of a user's own functor, in the loads and stores of backward
//
// The user's lines become a struct that is compiled with the kernel (dispatch/functor_text.py):
//   apply(row, col, values, gradients, other, other_gradient)   values: what f was applied to, a
//       pack; gradients: of f's result, and on return of f's argument. It also writes the gradients
//       of f's arrays, if `writes`. Several threads may write the same values to one place.
//
// ChainGradient    that of Chain: values between its functors are computed again
// DyThroughStore   the load of dy, where forward's store has f: the gradient of y from that of f(y)
// DxThroughLoad    part of SplitStore, where forward's load has f: that of x from that of f(x)
#pragma once
#include "functor.cuh"
#include "parameter.cuh"

// Forward: the first functor itself. Then: the gradient of those after it.
template <class Forward, class First, class Then>
struct ChainGradient {
  Forward forward;
  First first;
  Then then;

  template <int pack_size, bool writes = true, class C, class At, class GradientAt>
  __device__ __forceinline__ void apply(long long row, long long col, const C (&values)[pack_size],
                                        C (&gradients)[pack_size], const At& other,
                                        const GradientAt& other_gradient) const {
    // The gradient of the first one's result at another column.
    const auto through = [&](auto at) {
      const C value[1] = {other(at)};
      C gradient[1] = {other_gradient(at)};
      pass<false>(row, at, value, gradient, other, other_gradient);
      return gradient[0];
    };
    pass<writes>(row, col, values, gradients, other, other_gradient);
    first.template apply<pack_size, writes>(row, col, values, gradients, other, through);
  }

  template <bool writes, int pack_size, class C, class At, class GradientAt>
  __device__ __forceinline__ void pass(long long row, long long col, const C (&values)[pack_size],
                                       C (&gradients)[pack_size], const At& other,
                                       const GradientAt& other_gradient) const {
    C passed[pack_size];
#pragma unroll
    for (int at = 0; at < pack_size; ++at) passed[at] = values[at];
    forward.apply(row, col, passed, other);
    then.template apply<pack_size, writes>(row, col, passed, gradients, Nothing{}, other_gradient);
  }
};

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

// X: void if the gradient does not depend on x, which is then not read.
template <class X, class Functor>
struct DxThroughLoad {
  const X* x;
  long long x_stride;
  Functor functor;

  template <int pack_size, class Compute>
  __device__ __forceinline__ void apply(long long row, long long col,
                                        Compute (&gradients)[pack_size], bool present) const {
    if (!present) return;  // x has no such row or column
    // Gradients of other columns are not known yet.
    if constexpr (is_same<X, void>) {
      const Compute values[pack_size] = {};
      functor.apply(row, col, values, gradients, [](auto) { return Compute(0); }, Nothing{});
    } else {
      const X* row_start = x + row * x_stride;
      Compute values[pack_size];
      unpack(load_pack<pack_size>(row_start + col), values);
      functor.apply(row, col, values, gradients, OtherX<X, Compute>{row_start}, Nothing{});
    }
  }
};
