// mean_rstd.cuh -- mean and rstd of a row from its sums
#pragma once
#include "reduce.cuh"

__device__ __forceinline__ float rsqrt_rounded(float value) { return __frsqrt_rn(value); }
__device__ __forceinline__ double rsqrt_rounded(double value) { return 1.0 / sqrt(value); }
// A product that is rounded, never fused with the next operation, so that rows have the same bits
// in all kernels. dy * weight: also so that a row of one column gets exactly 0.
__device__ __forceinline__ float rounded_product(float left, float right) {
  return __fmul_rn(left, right);
}
__device__ __forceinline__ double rounded_product(double left, double right) {
  return __dmul_rn(left, right);
}
// numerator / denominator from the denominator's reciprocal, rounded as a division (Markstein
// 1990): an exact multiple of the denominator gives an exact quotient. An infinite numerator gives
// NaN.
template <class Compute>
__device__ __forceinline__ Compute divide(Compute numerator, Compute denominator,
                                          Compute reciprocal) {
  const Compute quotient = numerator * reciprocal;
  return fma(fma(-quotient, denominator, numerator), reciprocal, quotient);
}

// Mean and rstd of a row. The mean is first + rest: a number next to it, and what that is off by.
// x_hat is (value - first) * rstd + shift, which takes both into account: a large mean costs no
// digits.
template <class Compute>
struct RowStatistics {
  Compute mean;  // first + rest, rounded; this is what a call returns
  Compute rstd;
  Compute first;
  Compute shift;  // -rest * rstd. In a constant row it is 0, and so is x_hat

  template <bool centered>
  __device__ __forceinline__ Compute normalize(Compute value) const {
    if constexpr (centered) return (value - first) * rstd + shift;
    return value * rstd;
  }
  template <bool centered, int pack_size>
  __device__ __forceinline__ void normalize(const Compute (&values)[pack_size],
                                            Compute (&normalized)[pack_size]) const {
#pragma unroll
    for (int at = 0; at < pack_size; ++at) normalized[at] = normalize<centered>(values[at]);
  }
};

// RMSNorm: from the sum of squares.
template <class Compute>
__device__ __forceinline__ RowStatistics<Compute> uncentered(Compute squares, Compute reciprocal,
                                                             double eps) {
  return {0, rsqrt_rounded(squares * reciprocal + static_cast<Compute>(eps)), 0, 0};
}

// From the sums of (value - first) and of its square, where `first` is nearly the mean.
// moves_first: to the rounded mean, which in a constant row is its value. If `first` is that value
// already it stays, because differences that are still in registers are used again.
template <bool moves_first = false, class Compute>
__device__ __forceinline__ RowStatistics<Compute> corrected(Compute first,
                                                            const Sum<Compute, 2>& deviations,
                                                            Compute count, double eps) {
  const Compute reciprocal = Compute(1) / count;
  const Compute correction = divide(deviations.part[0], count, reciprocal);
  // The excess of the squares around `first`: in a constant row all of them, exactly.
  const Compute squares = deviations.part[1];
  const Compute excess = rounded_product(deviations.part[0], correction);
  // Leaves out an excess that overflowed: the variance is then infinite, not NaN. (x - x is 0 only
  // for finite x.)
  const Compute variance = (excess - excess == 0 ? squares - excess : squares) * reciprocal;
  // Rounding can make the variance slightly negative where it is near 0. The comparison keeps NaN;
  // a maximum would not.
  const Compute rstd =
      rsqrt_rounded((variance < 0 ? Compute(0) : variance) + static_cast<Compute>(eps));
  const Compute mean = first + correction;
  if constexpr (moves_first)
    return {mean, rstd, mean, rounded_product(mean - first - correction, rstd)};
  return {mean, rstd, first, rounded_product(-correction, rstd)};
}
