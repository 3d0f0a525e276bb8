// ring_moments.cuh -- mean and squares of the part of a row that one warp of a forward ring has
#pragma once
#include "exchange.cuh"
#include "mean_rstd.cuh"
#include "sums.cuh"

// The part's mean, and the sum of squared deviations from it, which merge to those of the row
// (Chan, Golub, LeVeque 1983). rest: the rounding error of the mean, 0 for equal values. RMSNorm:
// the sum of squares alone.
template <class Compute>
struct PartMoments {
  Compute mean;
  Compute squares;
  Compute rest;
};

// part.for_each_pack(f) calls f(pack, values), with zeros for a pack that is not in_part(pack).
template <bool centered, Statistics statistics, class Held, class Compute, class Part>
__device__ __forceinline__ PartMoments<Compute> part_moments(Part& part, int num_cols) {
  if constexpr (!centered) {
    Compute squares = 0;
    part.for_each_pack([&](int, const auto& values) { squares += squares_of(values); });
    return {0, warp_sum<32>(squares), 0};
  } else if constexpr (statistics == Statistics::two_pass) {
    const Compute count = static_cast<Compute>(max(num_cols, 1)), reciprocal = Compute(1) / count;
    Compute total = 0;
    part.for_each_pack([&](int, const auto& values) { total += sum_of(values); });
    total = warp_sum<32>(total);
    const Compute first = divide(total, count, reciprocal);
    // As in statistics.cuh: a sum of 16-bit values of one magnitude is exact in float.
    constexpr bool sums_rest = sizeof(Held) > 2;
    Sum<Compute, sums_rest ? 2 : 1> deviations{};
    part.for_each_pack([&](int pack, const auto& values) {
      constexpr int pack_size = sizeof(values) / sizeof(Compute);
      Compute centered_values[pack_size];
#pragma unroll
      for (int at = 0; at < pack_size; ++at)
        centered_values[at] = part.in_part(pack) ? values[at] - first : 0;
      deviations.part[0] += squares_of(centered_values);
      if constexpr (sums_rest) deviations.part[1] += sum_of(centered_values);
    });
    deviations = warp_reduce<32>(deviations);
    if constexpr (!sums_rest)
      return {first, deviations.part[0], fma(-first, count, total) * reciprocal};
    // The sums of deviations of equal values are exact, so their mean is that value.
    const Compute correction = divide(deviations.part[sums_rest], count, reciprocal);
    const Compute excess = deviations.part[sums_rest] * correction, mean = first + correction;
    return {mean, excess - excess == 0 ? deviations.part[0] - excess : deviations.part[0],
            correction - (mean - first)};
  } else {
    Moments<Compute> moments{};
    part.for_each_pack([&](int pack, const auto& values) {
      if (part.in_part(pack)) moments.merge(Moments<Compute>::of(values));
    });
    moments = warp_reduce<32>(moments);
    return {moments.part[1], moments.part[2], 0};
  }
}

// Sends the moments of this warp's part to all warps that share the row.
template <bool centered, Statistics statistics, class Compute, class MomentExchange, class Part>
__device__ __forceinline__ void send_moments(const MomentExchange& exchange, unsigned turn,
                                             Part& part, int part_cols) {
  const auto [mean, squares, rest] =
      part_moments<centered, statistics, typename Part::Held, Compute>(part, part_cols);
  if constexpr (MomentExchange::has_third) exchange.send_third(turn, rest);
  exchange.send(turn, has_second() ? squares : mean);
}
