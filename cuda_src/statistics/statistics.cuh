// statistics.cuh -- mean and rstd of one row, wherever it is kept
//
// two_pass   the mean first, then the squares of the centred values. The second pass also sums the
//            centred values: their mean is the rounding error of the first pass ("corrected
//            two-pass", Chan, Golub, LeVeque 1983). So y loses no digits to a large mean, and a
//            constant row gives exactly zero.
// welford    one pass and one exchange: moments of each pack, merged pairwise (reduce.cuh).
// RMSNorm has no mean: both are the mean of squares. E[x^2] - E[x]^2 is used nowhere.
#pragma once
#include "reduce.cuh"
#include "tile.cuh"

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

// Welford's statistics, from the moments of a whole row.
template <class Compute>
__device__ __forceinline__ RowStatistics<Compute> of_moments(const Moments<Compute>& moments,
                                                             Compute reciprocal, double eps) {
  return {moments.part[1], rsqrt_rounded(moments.part[2] * reciprocal + static_cast<Compute>(eps)),
          moments.part[1], 0};
}

// row: see uncached_row.cuh for its members. reduce.all adds over the threads that share the row.
template <class Compute, class Row, class Reduce>
__device__ __forceinline__ RowStatistics<Compute> rms_statistics(Row& row, Reduce& reduce,
                                                                 Compute count, double eps) {
  PackSums<Sum<Compute, 1>, Row::num_summed_packs> squares;
  row.for_each_pack_padded([&](long long, const auto& values, bool in_row) {
    const Compute of_pack = squares_of(values);
    squares.add({{in_row ? of_pack : Compute(0)}});
  });
  return uncentered(reduce.all(squares.total()).part[0], Compute(1) / count, eps);
}

template <class Compute, class Row, class Reduce>
__device__ __forceinline__ RowStatistics<Compute> two_pass_statistics(Row& row, Reduce& reduce,
                                                                      Compute count, double eps) {
  // The first pass: the mean.
  constexpr bool has_origin = requires { row.origin(); };
  Compute origin = 0;  // what the first pass subtracts
  if constexpr (has_origin) origin = row.origin();
  PackSums<Sum<Compute, 1>, Row::num_summed_packs> sums;
  row.for_each_pack_padded([&](long long, const auto& values, bool in_row) {
    const Compute of_pack = sum_of(values, origin);
    sums.add({{in_row ? of_pack : Compute(0)}});
  });
  const Sum<Compute, 1> total = reduce.all(sums.total());
  Compute first = divide(total.part[0], count, Compute(1) / count);
  if constexpr (has_origin) first += origin;

  // The second pass: the squares of the deviations from it. The sum of the deviations, `rest`,
  // shows the rounding error of the mean. If the sum of values is exact, the division's remainder
  // does.
  constexpr bool sums_rest = !Row::has_exact_sums;
  using Deviations = Sum<Compute, sums_rest ? 2 : 1>;  // of squares, of deviations
  PackSums<Deviations, Row::num_summed_packs> of_packs;
  row.for_each_pack_padded([&](long long, const auto& values, bool in_row) {
    constexpr int pack_size = sizeof(values) / sizeof(Compute);
    Compute centered_values[pack_size];
#pragma unroll
    for (int at = 0; at < pack_size; ++at) centered_values[at] = values[at] - first;
    const Compute squares = squares_of(centered_values);
    Deviations of_pack{{in_row ? squares : Compute(0)}};
    if constexpr (sums_rest) {
      const Compute sum = sum_of(centered_values);
      of_pack.part[1] = in_row ? sum : Compute(0);
    }
    of_packs.add(of_pack);
  });
  const Deviations deviations = reduce.all(of_packs.total());
  static_assert(sums_rest || !has_origin);
  const Compute rest = sums_rest ? deviations.part[sums_rest] : fma(-first, count, total.part[0]);
  constexpr bool moves_first = sums_rest && !has_origin && !Row::adds_equals_exactly;
  return corrected<moves_first>(first, {{rest, deviations.part[0]}}, count, eps);
}

template <class Compute, class Row, class Reduce>
__device__ __forceinline__ RowStatistics<Compute> welford_statistics(Row& row, Reduce& reduce,
                                                                     Compute count, double eps) {
  Moments<Compute> moments{};
  row.for_each_pack(
      [&](long long, const auto& values) { moments.merge(Moments<Compute>::of(values)); });
  return of_moments(reduce.all(moments), Compute(1) / count, eps);
}

template <bool centered, Statistics statistics, class Compute, class Row, class Reduce>
__device__ __forceinline__ RowStatistics<Compute> row_statistics(Row& row, Reduce& reduce,
                                                                 long long num_cols, double eps) {
  const Compute count = static_cast<Compute>(num_cols);
  if constexpr (!centered) {
    return rms_statistics(row, reduce, count, eps);
  } else if constexpr (statistics == Statistics::two_pass) {
    return two_pass_statistics(row, reduce, count, eps);
  } else {
    return welford_statistics(row, reduce, count, eps);
  }
}
