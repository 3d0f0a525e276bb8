// statistics.cuh -- mean and rstd of one row, whatever it waits in
//
// two_pass   mean first, then the squares of the centred values. The second pass also sums the centred values, whose
//            mean is what rounding took from the first (Chan, Golub, LeVeque 1983, "corrected two-pass"): with it
//            y does not lose a digit to a large mean, and a constant row gives exactly zero.
// welford    one pass and one exchange: moments of each pack, merged pairwise (Chan et al. 1979).
// Without a mean (RMSNorm) both are the mean of squares. E[x^2] - E[x]^2 is used nowhere.
#pragma once
#include "reduce.cuh"
#include "tile.cuh"

__device__ __forceinline__ float rsqrt_rounded(float value) { return __frsqrt_rn(value); }
__device__ __forceinline__ double rsqrt_rounded(double value) { return 1.0 / sqrt(value); }
// numerator / denominator from the denominator's reciprocal, rounded as a division is (Markstein 1990): exact multiples of
// the denominator give exact quotients. An infinite numerator gives NaN.
template <class Compute>
__device__ __forceinline__ Compute divide(Compute numerator, Compute denominator, Compute reciprocal) {
  const Compute quotient = numerator * reciprocal;
  return fma(fma(-quotient, denominator, numerator), reciprocal, quotient);
}

// x_hat = (value - mean) * rstd + shift
template <class Compute>
struct RowStatistics {
  Compute mean;
  Compute rstd;
  Compute shift;  // -rest * rstd, where rest is what mean lacks of the exact mean: exactly 0 for a constant row

  template <bool centered>
  __device__ __forceinline__ Compute normalize(Compute value) const {
    if constexpr (centered) return (value - mean) * rstd + shift;
    return value * rstd;
  }
};

// Of one pack. A tree and a chain of its own: packs do not wait for one another.
template <int pack_size, class Compute>
__device__ __forceinline__ Compute sum_of(const Compute (&values)[pack_size]) {
  Compute sums[pack_size];
#pragma unroll
  for (int at = 0; at < pack_size; ++at) sums[at] = values[at];
#pragma unroll
  for (int width = pack_size / 2; width > 0; width /= 2) {
#pragma unroll
    for (int at = 0; at < width; ++at) sums[at] += sums[at + width];
  }
  return sums[0];
}
template <int pack_size, class Compute>
__device__ __forceinline__ Compute squares_of(const Compute (&values)[pack_size]) {
  Compute squares = values[0] * values[0];
#pragma unroll
  for (int at = 1; at < pack_size; ++at) squares += values[at] * values[at];
  return squares;
}

// count, mean and sum of squared deviations of some values of a row
template <class Compute>
struct Moments {
  static constexpr int size = 3;
  static constexpr bool ordered = true;
  Compute part[3];

  __device__ __forceinline__ void merge(const Moments& other) {
    const Compute count = part[0] + other.part[0];
    const Compute share = count > 0 ? other.part[0] / count : Compute(0);
    const Compute delta = other.part[1] - part[1];
    part[1] += delta * share;
    // In this order: an infinite square times the zero of an empty side would be NaN.
    part[2] += other.part[2] + delta * (part[0] * share) * delta;
    part[0] = count;
  }

  template <int pack_size>
  __device__ __forceinline__ static Moments of(const Compute (&values)[pack_size]) {
    // Relative to the first value: equal values give exactly that value and zero.
    Compute shifted = 0;
#pragma unroll
    for (int at = 1; at < pack_size; ++at) shifted += values[at] - values[0];
    const Compute mean = values[0] + shifted * (Compute(1) / pack_size);
    Compute squares = 0;
#pragma unroll
    for (int at = 0; at < pack_size; ++at) squares += (values[at] - mean) * (values[at] - mean);
    return {{Compute(pack_size), mean, squares}};
  }
};

// `row` has for_each_pack(f): f(col, values) for each pack of the row that this thread owns.
template <bool centered, Statistics statistics, class Compute, class Row, class Reduce>
__device__ __forceinline__ RowStatistics<Compute> row_statistics(Row& row, Reduce& reduce, long long num_cols, double eps) {
  const Compute count = static_cast<Compute>(num_cols);
  const Compute reciprocal = Compute(1) / count;
  if constexpr (!centered) {
    Sum<Compute, 1> squares{};
    row.for_each_pack([&](long long, const auto& values) { squares.part[0] += squares_of(values); });
    squares = reduce.all(squares);
    return {0, rsqrt_rounded(squares.part[0] * reciprocal + static_cast<Compute>(eps)), 0};
  } else if constexpr (statistics == Statistics::two_pass) {
    Sum<Compute, 1> total{};
    row.for_each_pack([&](long long, const auto& values) { total.part[0] += sum_of(values); });
    const Compute first = divide(reduce.all(total).part[0], count, reciprocal);
    Sum<Compute, 2> deviations{};
    row.for_each_pack([&](long long, const auto& values) {
      constexpr int pack_size = sizeof(values) / sizeof(Compute);
      Compute centered_values[pack_size];
#pragma unroll
      for (int at = 0; at < pack_size; ++at) centered_values[at] = values[at] - first;
      deviations.part[0] += sum_of(centered_values);
      deviations.part[1] += squares_of(centered_values);
    });
    deviations = reduce.all(deviations);
    const Compute correction = divide(deviations.part[0], count, reciprocal);
    const Compute mean_square = deviations.part[1] * reciprocal;
    const Compute excess = correction * correction;
    // An excess that overflowed is left out (x - x is 0 for finite x alone): the variance is infinite then, not NaN.
    const Compute variance = excess - excess == 0 ? mean_square - excess : mean_square;
    // Rounding can leave a constant row a hair below zero; the comparison lets NaN through, where a maximum would not.
    const Compute rstd = rsqrt_rounded((variance < 0 ? Compute(0) : variance) + static_cast<Compute>(eps));
    const Compute mean = first + correction;
    const Compute rest = correction - (mean - first);
    return {mean, rstd, -rest * rstd};
  } else {
    Moments<Compute> moments{};
    row.for_each_pack([&](long long, const auto& values) { moments.merge(Moments<Compute>::of(values)); });
    moments = reduce.all(moments);
    return {moments.part[1], rsqrt_rounded(moments.part[2] * reciprocal + static_cast<Compute>(eps)), 0};
  }
}
