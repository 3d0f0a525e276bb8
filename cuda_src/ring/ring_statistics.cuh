// ring_statistics.cuh -- mean and rstd of a row whose parts belong to the warps of a forward ring
//
// send_moments (ring_moments.cuh)    each warp: the moments of its part, to all warps of the row
// send_statistics                    one warp of each block: the statistics, to the others
// receive_statistics                 each warp
#pragma once
#include "ring_moments.cuh"

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
  call.save(turns.first_row + turn * turns.step, mean_rstd,
            is_first && (tile.cluster_size == 1 || cluster_rank() == 0));
  if (is_first)
    broadcast.send(turn, make_float4(mean_rstd.first, mean_rstd.rstd, mean_rstd.shift, 0));
}
template <class Compute, Tile tile>
__device__ __forceinline__ RowStatistics<Compute> receive_statistics(
    const Broadcast<tile>& broadcast, unsigned turn) {
  const float4 received = broadcast.receive(turn);  // the mean itself is saved by the sender
  return RowStatistics<Compute>{0, received.y, received.x, received.z};
}
