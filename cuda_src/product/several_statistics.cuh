// several_statistics.cuh -- norm_linear_several.cu: mean and rstd of rows, by a cluster
//
// Rows: SeveralRows. By all warps that normalise; a warp has every 16th row.
#pragma once
#include "several_rows.cuh"

template <bool centered, class Rows>
__device__ __forceinline__ Deviations deviations_of(const Rows& rows, int row) {
  const auto for_each = [&](auto f) {
    rows.for_each_own(row, [&](auto* pack, int) {
      float values[8];
      unpack(load_pack<8>(pack), values);
      f(values);
    });
  };
  if constexpr (centered) {
    float sample[8] = {};
    const bool samples = rows.lane * 8 < rows.part.num_cols;
    if (samples) unpack(load_pack<8>(rows.pack(row, rows.lane * 8)), sample);
    return warp_deviations(sample, samples, rows.part.num_cols, for_each);
  } else {
    Sum<float, 2> squares{};
    for_each([&](const auto& values) { squares.part[0] += squares_of(values); });
    return {0.0f, warp_reduce<32>(squares)};
  }
}

// Of this block's columns, to all blocks of the cluster.
template <bool centered, class Rows>
__device__ __forceinline__ void send_deviations(const Rows& rows) {
  SeveralHead& head = rows.memory.head;
  const int num_rows = rows.memory.num_rows;
  if (threadIdx.x == 0) bulk_expect(&head.measured, cluster_size * num_rows * sizeof(Deviations));
  async_wait<0>();
  __syncwarp();
  for (int row = rows.warp; row < num_rows; row += num_normalizing_warps) {
    const Deviations found = deviations_of<centered>(rows, row);
    if (rows.lane >= cluster_size) continue;
    Deviations& to = head.deviations[rows.part.rank][row];
    cluster_send(&to.first, found.first, &head.measured, rows.lane);
    cluster_send(&to.sums.part[0], found.sums.part[0], &head.measured, rows.lane);
    cluster_send(&to.sums.part[1], found.sums.part[1], &head.measured, rows.lane);
  }
}

// A thread has a row's deviations of one block. Means are relative to that of the first block, so
// that they are as exact as if one warp had computed them.
template <bool centered, class Rows>
__device__ __forceinline__ void find_mean_rstd(const Rows& rows) {
  SeveralHead& head = rows.memory.head;
  const auto& call = rows.call;
  const int num_rows = rows.memory.num_rows, rank = threadIdx.x % cluster_size;
  const int num_cols = rows.part.cols_of(call, rank);
  bulk_wait(&head.measured, 0);
  for (int at = threadIdx.x; at / 32 * 32 < num_rows * cluster_size;
       at += num_normalizing_warps * 32) {
    const int row = min(at / cluster_size, num_rows - 1);
    const float origin = head.deviations[0][row].first;
    const Deviations& found = head.deviations[rank][row];
    Moments<float> of_block{};
    if (!centered)
      of_block.part[2] = found.sums.part[0];
    else if (num_cols > 0)
      of_block = corrected_moments(num_cols, found.first - origin, found.sums);
    float2 mean_rstd = mean_rstd_of<centered, cluster_size>(of_block, call.in_features, call.eps);
    mean_rstd.x += origin;
    if (at >= num_rows * cluster_size || rank != 0) continue;
    head.mean_rstd[row] = mean_rstd;
    if (blockIdx.x == 0) save_mean_rstd(call, row, mean_rstd);
  }
}
