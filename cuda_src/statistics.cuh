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

// x_hat = (value - first) * rstd + shift
template <class Compute>
struct RowStatistics {
  Compute mean;
  Compute rstd;
  Compute first;  // nearly the mean: what the squares were centred by, so that a value that waits in registers is centred once
  Compute shift;  // -rest * rstd, where rest is what first lacks of the exact mean: exactly 0 for a constant row

  template <bool centered>
  __device__ __forceinline__ Compute normalize(Compute value) const {
    if constexpr (centered) return (value - first) * rstd + shift;
    return value * rstd;
  }
  template <bool centered, int pack_size>
  __device__ __forceinline__ void normalize(const Compute (&values)[pack_size], Compute (&normalized)[pack_size]) const {
#pragma unroll
    for (int at = 0; at < pack_size; ++at) normalized[at] = normalize<centered>(values[at]);
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
  static constexpr bool ordered = true, is_maximum = false;
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

// Adds up what the packs of a thread give, of a row that a warp or part of one owns in the order in which twice as many lanes
// with half as many packs each would: even packs, odd packs, and so on within both. So lanes may be more where rows are few,
// and every bit stays. Value: a Sum. num_packs: 0 where they are not known, or are added one after the other.
template <class Value, int num_packs>
struct PackSums {
  Value of_pack[num_packs];
  int pack = 0;

  __device__ __forceinline__ void add(const Value& value) { of_pack[pack++] = value; }
  __device__ __forceinline__ Value total() const { return total_of<0, 1, num_packs>(); }

 private:
  template <int first, int step, int count>
  __device__ __forceinline__ Value total_of() const {
    if constexpr (count % 2 == 0) {
      Value total = total_of<first, 2 * step, count / 2>();
      total.merge(total_of<first + step, 2 * step, count / 2>());
      return total;
    } else {
      Value total = of_pack[first];
#pragma unroll
      for (int at = 1; at < count; ++at) total.merge(of_pack[first + at * step]);
      return total;
    }
  }
};
template <class Value>
struct PackSums<Value, 0> {
  Value sum{};

  __device__ __forceinline__ void add(const Value& value) { sum.merge(value); }
  __device__ __forceinline__ Value total() const { return sum; }
};

// Without a mean, from the sum of squares.
template <class Compute>
__device__ __forceinline__ RowStatistics<Compute> uncentered(Compute squares, Compute reciprocal, double eps) {
  return {0, rsqrt_rounded(squares * reciprocal + static_cast<Compute>(eps)), 0, 0};
}

// From sums of (value - first) and of its square, where `first` is nearly the mean.
template <class Compute>
__device__ __forceinline__ RowStatistics<Compute> corrected(Compute first, const Sum<Compute, 2>& deviations, Compute count,
                                                            double eps) {
  const Compute reciprocal = Compute(1) / count;
  const Compute correction = divide(deviations.part[0], count, reciprocal);
  const Compute mean_square = deviations.part[1] * reciprocal;
  const Compute excess = correction * correction;
  // An excess that overflowed is left out (x - x is 0 for finite x alone): the variance is infinite then, not NaN.
  const Compute variance = excess - excess == 0 ? mean_square - excess : mean_square;
  // Rounding can leave a constant row a hair below zero; the comparison lets NaN through, where a maximum would not.
  const Compute rstd = rsqrt_rounded((variance < 0 ? Compute(0) : variance) + static_cast<Compute>(eps));
  return {first + correction, rstd, first, -correction * rstd};
}

// `row` has for_each_pack(f), for_each_pack_or_none(f) and num_packs, as in row.cuh.
template <bool centered, Statistics statistics, class Compute, class Row, class Reduce>
__device__ __forceinline__ RowStatistics<Compute> row_statistics(Row& row, Reduce& reduce, long long num_cols, double eps) {
  const Compute count = static_cast<Compute>(num_cols);
  const Compute reciprocal = Compute(1) / count;
  if constexpr (!centered) {
    PackSums<Sum<Compute, 1>, Row::num_packs> squares;
    row.for_each_pack_or_none([&](long long, const auto& values, bool in_row) {
      const Compute found = squares_of(values);
      squares.add({{in_row ? found : Compute(0)}});
    });
    return uncentered(reduce.all(squares.total()).part[0], reciprocal, eps);
  } else if constexpr (statistics == Statistics::two_pass) {
    PackSums<Sum<Compute, 1>, Row::num_packs> sums;
    row.for_each_pack_or_none([&](long long, const auto& values, bool in_row) {
      const Compute found = sum_of(values);
      sums.add({{in_row ? found : Compute(0)}});
    });
    const Sum<Compute, 1> total = reduce.all(sums.total());
    const Compute first = divide(total.part[0], count, reciprocal);
    // Where the sum is exact, what the mean lacks is what the division leaves.
    constexpr bool correct = !Row::has_exact_sums;
    using Deviations = Sum<Compute, correct ? 2 : 1>;
    PackSums<Deviations, Row::num_packs> of_packs;
    row.for_each_pack_or_none([&](long long, const auto& values, bool in_row) {
      constexpr int pack_size = sizeof(values) / sizeof(Compute);
      Compute centered_values[pack_size];
#pragma unroll
      for (int at = 0; at < pack_size; ++at) centered_values[at] = values[at] - first;
      const Compute squares = squares_of(centered_values);
      Deviations found{{in_row ? squares : Compute(0)}};
      if constexpr (correct) {
        const Compute sum = sum_of(centered_values);
        found.part[correct] = in_row ? sum : Compute(0);
      }
      of_packs.add(found);
    });
    const Deviations deviations = reduce.all(of_packs.total());
    const Compute rest = correct ? deviations.part[correct] : fma(-first, count, total.part[0]);
    return corrected(first, {{rest, deviations.part[0]}}, count, eps);
  } else {
    Moments<Compute> moments{};
    row.for_each_pack([&](long long, const auto& values) { moments.merge(Moments<Compute>::of(values)); });
    moments = reduce.all(moments);
    return {moments.part[1], rsqrt_rounded(moments.part[2] * reciprocal + static_cast<Compute>(eps)), moments.part[1], 0};
  }
}

// Of a part of a row that a warp holds: its mean, and the sum of squared deviations from it (Chan, Golub, LeVeque 1983 merge
// such parts); rest is what rounding took from the mean. Without a mean, the sum of squares.
template <class Compute>
struct PartMoments {
  Compute mean;
  Compute squares;
  Compute rest;
};
// part has for_each_pack(f), which gives f zeros for the packs that in_part(pack) denies.
template <bool centered, Statistics statistics, class Held, class Compute, class Part>
__device__ __forceinline__ PartMoments<Compute> part_moments(Part& part, int num_cols) {
  if constexpr (!centered) {
    Sum<Compute, 1> squares{};
    part.for_each_pack([&](int, const auto& values) { squares.part[0] += squares_of(values); });
    return {0, warp_reduce<32>(squares).part[0], 0};
  } else if constexpr (statistics == Statistics::two_pass) {
    const Compute count = static_cast<Compute>(max(num_cols, 1)), reciprocal = Compute(1) / count;
    Sum<Compute, 1> total{};
    part.for_each_pack([&](int, const auto& values) { total.part[0] += sum_of(values); });
    total = warp_reduce<32>(total);
    const Compute first = divide(total.part[0], count, reciprocal);
    // A sum of 16-bit values of one size is exact in float: there the rest is what the division leaves.
    constexpr bool correct = sizeof(Held) > 2;
    Sum<Compute, correct ? 2 : 1> deviations{};
    part.for_each_pack([&](int pack, const auto& values) {
      constexpr int pack_size = sizeof(values) / sizeof(Compute);
      Compute centered_values[pack_size];
#pragma unroll
      for (int at = 0; at < pack_size; ++at) centered_values[at] = part.in_part(pack) ? values[at] - first : 0;
      deviations.part[0] += squares_of(centered_values);
      if constexpr (correct) deviations.part[1] += sum_of(centered_values);
    });
    deviations = warp_reduce<32>(deviations);
    if constexpr (!correct) return {first, deviations.part[0], fma(-first, count, total.part[0]) * reciprocal};
    const Compute rest = deviations.part[correct] * reciprocal;
    const Compute excess = deviations.part[correct] * rest;
    return {first, excess - excess == 0 ? deviations.part[0] - excess : deviations.part[0], rest};
  } else {
    Moments<Compute> moments{};
    part.for_each_pack([&](int pack, const auto& values) {
      if (part.in_part(pack)) moments.merge(Moments<Compute>::of(values));
    });
    moments = warp_reduce<32>(moments);
    return {moments.part[1], moments.part[2], 0};
  }
}
