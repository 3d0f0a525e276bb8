// statistics.cuh -- mean and rstd of one row, whatever it waits in
//
// two_pass   mean first, then the squares of the centred values. The second pass also sums the centred values, whose
//            mean is what rounding took from the first (Chan, Golub, LeVeque 1983, "corrected two-pass"): it is
//            subtracted again, so y does not lose a digit to a large mean and a constant row gives exactly zero.
// welford    one pass and one exchange: moments of each pack, merged pairwise (Chan et al. 1979).
// Without a mean (RMSNorm) both are the mean of squares. E[x^2] - E[x]^2 is used nowhere.
#pragma once
#include "reduce.cuh"
#include "tile.cuh"

__device__ __forceinline__ float rsqrt_rounded(float value) { return __frsqrt_rn(value); }
__device__ __forceinline__ double rsqrt_rounded(double value) { return 1.0 / sqrt(value); }
__device__ __forceinline__ float divide(float numerator, float denominator) { return __fdiv_rn(numerator, denominator); }
__device__ __forceinline__ double divide(double numerator, double denominator) { return numerator / denominator; }

// x_hat = ((value - mean) - correction) * rstd
template <class Compute>
struct RowStatistics {
  Compute mean;
  Compute correction;
  Compute rstd;

  template <bool centered>
  __device__ __forceinline__ Compute normalize(Compute value) const {
    if constexpr (centered) return ((value - mean) - correction) * rstd;
    return value * rstd;
  }
};

// count, mean and sum of squared deviations of some values of a row
template <class Compute>
struct Moments {
  static constexpr int size = 3;
  static constexpr bool ordered = true;
  Compute part[3];

  __device__ __forceinline__ void merge(const Moments& other) {
    const Compute count = part[0] + other.part[0];
    const Compute share = count > 0 ? divide(other.part[0], count) : Compute(0);
    const Compute delta = other.part[1] - part[1];
    part[1] += delta * share;
    part[2] += other.part[2] + delta * delta * (part[0] * share);
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
  if constexpr (!centered) {
    Sum<Compute, 1> squares{};
    row.for_each_pack([&](long long, const auto& values) {
      for (const Compute value : values) squares.part[0] += value * value;
    });
    squares = reduce.all(squares);
    return {0, 0, rsqrt_rounded(divide(squares.part[0], count) + static_cast<Compute>(eps))};
  } else if constexpr (statistics == Statistics::two_pass) {
    Sum<Compute, 1> total{};
    row.for_each_pack([&](long long, const auto& values) {
      for (const Compute value : values) total.part[0] += value;
    });
    const Compute mean = divide(reduce.all(total).part[0], count);
    Sum<Compute, 2> deviations{};
    row.for_each_pack([&](long long, const auto& values) {
      for (const Compute value : values) {
        const Compute deviation = value - mean;
        deviations.part[0] += deviation;
        deviations.part[1] += deviation * deviation;
      }
    });
    deviations = reduce.all(deviations);
    const Compute correction = divide(deviations.part[0], count);
    const Compute variance = divide(deviations.part[1], count) - correction * correction;
    // Rounding can leave a constant row a hair below zero; the comparison lets NaN through, where a maximum would not.
    return {mean, correction, rsqrt_rounded((variance < 0 ? Compute(0) : variance) + static_cast<Compute>(eps))};
  } else {
    Moments<Compute> moments{};
    row.for_each_pack([&](long long, const auto& values) { moments.merge(Moments<Compute>::of(values)); });
    moments = reduce.all(moments);
    return {moments.part[1], 0, rsqrt_rounded(divide(moments.part[2], count) + static_cast<Compute>(eps))};
  }
}
