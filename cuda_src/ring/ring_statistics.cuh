// ring_statistics.cuh -- mean and rstd of a row whose parts belong to the warps of a forward ring
//
// send_moments          each warp: the moments of its part, to all warps of the row
// send_statistics       one warp of each block: the statistics, to the others
// receive_statistics    each warp
#pragma once
#include "exchange.cuh"
#include "reduce.cuh"
#include "statistics.cuh"

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

// Four floats of a row, from the warp that computed them to all warps of its block. Two buffers
// are enough. The statistics of turn t + 2 are computed when all warps have sent their
// moments of that turn. A warp sends these after it has received the broadcast of turn t.
template <Tile tile>
struct Broadcast {
  static constexpr int group_bytes = 2 * (sizeof(float4) + sizeof(unsigned long long));
  static constexpr int smem_bytes = tile.rows_per_block * group_bytes;

  float4* buffers;               // [2]
  unsigned long long* barriers;  // [2]

  // The caller synchronises the block before the first receive. smem: 16-byte aligned
  __device__ __forceinline__ explicit Broadcast(unsigned char* smem)
      : buffers(reinterpret_cast<float4*>(smem + RingShape<tile>::group() * group_bytes)),
        barriers(reinterpret_cast<unsigned long long*>(buffers + 2)) {
    if (RingShape<tile>::thread() == 0) {
      bulk_barrier_init(barriers);
      bulk_barrier_init(barriers + 1);
    }
  }

  // Called by one thread.
  __device__ __forceinline__ void send(unsigned turn, const float4& values) const {
    const int buffer = static_cast<int>(turn % 2);
    buffers[buffer] = values;
    bulk_arrive(barriers + buffer);
  }
  __device__ __forceinline__ float4 receive(unsigned turn) const {
    const int buffer = static_cast<int>(turn % 2);
    bulk_wait(barriers + buffer, turn / 2);
    return buffers[buffer];
  }
};

// Called by all lanes of a warp. exchange: what the warps have sent: mean, squares and, if it has
// three values, rest. source_cols: the number of columns of each warp whose moments this lane
// reads.
template <bool centered, class MomentExchange, class Compute>
__device__ __forceinline__ RowStatistics<Compute> statistics_of_moments(
    const MomentExchange& exchange, unsigned turn,
    const Compute (&source_cols)[MomentExchange::sources_per_lane], int num_cols, double eps) {
  constexpr bool has_rest = MomentExchange::has_third;
  const Compute count = static_cast<Compute>(num_cols), reciprocal = Compute(1) / count;
  // The mean of one part: those of all parts of a constant row are equal to it.
  const Compute origin = usable_origin(exchange.buffer(turn)[0]);
  Compute total = 0;
  exchange.for_each_source([&](int index) {
    total += centered ? source_cols[index] * (exchange.received(turn, 0, index) - origin)
                      : exchange.received(turn, 1, index);
  });
  total = warp_sum<MomentExchange::lanes>(total);
  if constexpr (!centered) return uncentered(total, reciprocal, eps);
  const Compute first = origin + divide(total, count, reciprocal);
  Compute deviations = 0;  // in the lower half of the lanes their sum, in the upper that of squares
  exchange.for_each_source([&](int index) {
    Compute distance = exchange.received(turn, 0, index) - first;
    if constexpr (has_rest) distance += exchange.received(turn, 2, index);
    const Compute weighed = source_cols[index] * distance;
    deviations += has_second() ? exchange.received(turn, 1, index) + weighed * distance : weighed;
  });
  return corrected(first, both_halves(warp_sum<MomentExchange::lanes>(deviations)), count, eps);
}

// Called by one warp: computes the statistics of a turn's row, saves them, and sends them to the
// other warps of its block.
template <bool centered, Tile tile, class Call, class MomentExchange, class Compute>
__device__ __forceinline__ void send_statistics(
    const Call& call, const Turns<tile>& turns, unsigned turn, int num_cols,
    const MomentExchange& exchange, const Compute (&source_cols)[MomentExchange::sources_per_lane],
    const Broadcast<tile>& broadcast) {
  const bool is_first = threadIdx.x % 32 == 0;
  exchange.wait(turn, is_first);
  const RowStatistics<Compute> mean_rstd =
      statistics_of_moments<centered>(exchange, turn, source_cols, num_cols, call.eps);
  call.save({turns.first_row + turn * turns.step,
             is_first && (tile.cluster_size == 1 || cluster_rank() == 0)},
            mean_rstd);
  if (is_first)
    broadcast.send(turn, make_float4(mean_rstd.first, mean_rstd.rstd, mean_rstd.shift, 0));
}
template <class Compute, Tile tile>
__device__ __forceinline__ RowStatistics<Compute> receive_statistics(
    const Broadcast<tile>& broadcast, unsigned turn) {
  const float4 received = broadcast.receive(turn);  // the mean itself is saved by the sender
  return RowStatistics<Compute>{0, received.y, received.x, received.z};
}
