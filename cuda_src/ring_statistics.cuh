// ring_statistics.cuh -- mean and rstd of a row whose parts belong to the warps of a forward ring
//
// part_moments             mean and squares of the part that one warp has
// statistics_of_moments    the statistics of a row, from the moments that all of its warps have
//                          sent
#pragma once
#include "broadcast.cuh"
#include "exchange.cuh"
#include "mean_rstd.cuh"
#include "sums.cuh"
#include "turns.cuh"

// The part's mean, and the sum of squared deviations from it, which merge to those of the row
// (Chan, Golub, LeVeque 1983). rest: the rounding error of the mean. RMSNorm: the sum of squares
// alone.
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
    Sum<Compute, 1> squares{};
    part.for_each_pack([&](int, const auto& values) { squares.part[0] += squares_of(values); });
    return {0, warp_reduce<32>(squares).part[0], 0};
  } else if constexpr (statistics == Statistics::two_pass) {
    const Compute count = static_cast<Compute>(max(num_cols, 1)), reciprocal = Compute(1) / count;
    Sum<Compute, 1> total{};
    part.for_each_pack([&](int, const auto& values) { total.part[0] += sum_of(values); });
    total = warp_reduce<32>(total);
    const Compute first = divide(total.part[0], count, reciprocal);
    // A sum of 16-bit values of one magnitude is exact in float: then the rest is the remainder of
    // the division.
    constexpr bool correct = sizeof(Held) > 2;
    Sum<Compute, correct ? 2 : 1> deviations{};
    part.for_each_pack([&](int pack, const auto& values) {
      constexpr int pack_size = sizeof(values) / sizeof(Compute);
      Compute centered_values[pack_size];
#pragma unroll
      for (int at = 0; at < pack_size; ++at)
        centered_values[at] = part.in_part(pack) ? values[at] - first : 0;
      deviations.part[0] += squares_of(centered_values);
      if constexpr (correct) deviations.part[1] += sum_of(centered_values);
    });
    deviations = warp_reduce<32>(deviations);
    if constexpr (!correct)
      return {first, deviations.part[0], fma(-first, count, total.part[0]) * reciprocal};
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

// Called by all lanes of a warp. exchange: what the warps have sent: mean, squares and, if it has
// three values, rest. source_cols: the number of columns of each warp whose moments this lane
// reads.
template <bool centered, class Moments, class Compute>
__device__ __forceinline__ RowStatistics<Compute> statistics_of_moments(
    const Moments& exchange, unsigned turn, const Compute (&source_cols)[Moments::sources_per_lane],
    int num_cols, double eps) {
  constexpr bool has_rest = Moments::has_third;
  const Compute count = static_cast<Compute>(num_cols), reciprocal = Compute(1) / count;
  Sum<Compute, 1> total{};
  exchange.for_each_source([&](int index) {
    total.part[0] += centered ? source_cols[index] * exchange.received(turn, 0, index)
                              : exchange.received(turn, 1, index);
  });
  total = warp_reduce<Moments::lanes>(total);
  if constexpr (!centered) return uncentered(total.part[0], reciprocal, eps);
  const Compute first = divide(total.part[0], count, reciprocal);
  Sum<Compute, 1> deviations{};
  exchange.for_each_source([&](int index) {
    Compute distance = exchange.received(turn, 0, index) - first;
    if constexpr (has_rest) distance += exchange.received(turn, 2, index);
    const Compute weighed = source_cols[index] * distance;
    deviations.part[0] +=
        has_second() ? exchange.received(turn, 1, index) + weighed * distance : weighed;
  });
  return corrected(first, both_halves(warp_reduce<Moments::lanes>(deviations).part[0]), count, eps);
}

// Sends the moments of this warp's part to all warps that share the row.
template <bool centered, Statistics statistics, class Compute, class Moments, class Part>
__device__ __forceinline__ void send_moments(const Moments& exchange, unsigned turn, Part& part,
                                             int part_cols) {
  const auto [mean, squares, rest] =
      part_moments<centered, statistics, typename Part::Held, Compute>(part, part_cols);
  if constexpr (Moments::has_third) exchange.send_third(turn, rest);
  exchange.send(turn, has_second() ? squares : mean);
}

// Called by one warp: computes the statistics of a turn's row, saves them, and sends them to the
// other warps of its block.
template <bool centered, Tile tile, class Problem, class Moments, class Compute>
__device__ __forceinline__ void send_statistics(
    const Problem& problem, const Turns<tile>& turns, unsigned turn, int num_cols,
    const Moments& exchange, const Compute (&source_cols)[Moments::sources_per_lane],
    const Broadcast<tile>& broadcast) {
  const bool is_first = threadIdx.x % 32 == 0;
  exchange.wait(turn, is_first);
  const RowStatistics<Compute> mean_rstd =
      statistics_of_moments<centered>(exchange, turn, source_cols, num_cols, problem.eps);
  problem.save(turns.first_row + turn * turns.step, mean_rstd,
               is_first && (tile.cluster_size == 1 || cluster_rank() == 0));
  if (is_first)
    broadcast.send(turn, make_float4(mean_rstd.first, mean_rstd.rstd, mean_rstd.shift, 0));
}
template <class Compute, Tile tile>
__device__ __forceinline__ RowStatistics<Compute> receive_statistics(
    const Broadcast<tile>& broadcast, unsigned turn) {
  const float4 received = broadcast.receive(turn);
  return RowStatistics<Compute>{0, received.y, received.x, received.z};
}
