// normalized_rows.cuh -- norm_linear_few.cu: the rows, normalised in the block's shared memory
#pragma once
#include "memory.cuh"
#include "parameter.cuh"
#include "warp_moments.cuh"
#include "weight_units.cuh"

// A thread has every num_threads-th pack of each row, from load to normalize.
template <class T, bool centered, int num_rows>
struct NormalizedRows {
  static constexpr int num_threads = num_warps * 32;
  Moments<float>* moments;  // [num_rows][num_warps]
  T* rows;                  // [num_rows][padded_cols], 0 beyond num_cols
  const int num_cols, padded_cols;

  __device__ __forceinline__ NormalizedRows(unsigned char* smem, int num_cols, int num_parts)
      : moments(reinterpret_cast<Moments<float>*>(smem)),
        rows(reinterpret_cast<T*>(moments + num_rows * num_warps)),
        num_cols(num_cols),
        padded_cols(num_parts * part_cols) {}
  __device__ __forceinline__ T* at(int row, int col) const {
    return rows + row * padded_cols + col;
  }
  __device__ __forceinline__ float* end() const {
    return reinterpret_cast<float*>(at(num_rows, 0));
  }

  // f(pack, col) for the thread's packs of a row, where they are in shared memory.
  template <class F>
  __device__ __forceinline__ void for_each_own(int row, F f) const {
#pragma unroll 1
    for (int col = threadIdx.x * 8; col < num_cols; col += num_threads * 8) f(at(row, col), col);
  }
  __device__ __forceinline__ void load(const T* x) const {
#pragma unroll
    for (int row = 0; row < num_rows; ++row) {
      for_each_own(row, [&](T* pack, int col) {
        async_copy<8>(pack, x + static_cast<long long>(row) * num_cols + col);
      });
      for (int col = num_cols + threadIdx.x * 8; col < padded_cols; col += num_threads * 8)
        store_pack<8>(at(row, col), Pack<T, 8>{});
    }
    async_commit();
  }

  // Of the warp's packs. RMSNorm: the sum of squares alone.
  __device__ __forceinline__ Moments<float> moments_of(int row) const {
    const auto for_each = [&](auto f) {
      for_each_own(row, [&](const T* pack, int) {
        float values[8];
        unpack(load_pack<8>(pack), values);
        f(values);
      });
    };
    if constexpr (centered) {
      const int num_packs = num_cols / 8, rest = num_packs % num_threads;
      const int first = threadIdx.x / 32 * 32, of_rest = max(0, min(rest - first, 32));
      const int count = (num_packs / num_threads * 32 + of_rest) * 8;
      const int col = static_cast<int>(threadIdx.x) * 8;
      float sample[8] = {};
      if (col < num_cols) unpack(load_pack<8>(at(row, col)), sample);
      return warp_moments(sample, col < num_cols, count, for_each);
    } else {
      Sum<float, 1> squares{};
      for_each([&](const auto& values) { squares.part[0] += squares_of(values); });
      return {{0.0f, 0.0f, warp_reduce<32>(squares).part[0]}};
    }
  }
  // mean and rstd, from the moments of all warps.
  __device__ __forceinline__ float2 statistics_of(int row, double eps) const {
    const int lane = threadIdx.x % 32;
    Moments<float> of_warp[1] = {};
    if (lane < num_warps) of_warp[0] = moments[row * num_warps + lane];
    Moments<float> total{};
    if constexpr (centered)
      total = total_of(of_warp);
    else
      total.part[2] = warp_reduce<32>(Sum<float, 1>{{of_warp[0].part[2]}}).part[0];
    return make_float2(total.part[1], uncentered(total.part[2], 1.0f / num_cols, eps).rstd);
  }

  template <class Problem>
  __device__ __forceinline__ void normalize(const Problem& problem) const {
    async_wait<0>();
#pragma unroll
    for (int row = 0; row < num_rows; ++row) {
      const Moments<float> found = moments_of(row);
      if (threadIdx.x % 32 == 0) moments[row * num_warps + threadIdx.x / 32] = found;
    }
    __syncthreads();
#pragma unroll
    for (int row = 0; row < num_rows; ++row) {
      const float2 found = statistics_of(row, problem.eps);
      if (blockIdx.x == 0 && threadIdx.x == 0) {
        if (problem.mean) problem.mean[row] = found.x;
        if (problem.rstd) problem.rstd[row] = found.y;
      }
      for_each_own(row, [&](T* pack, int col) {
        float values[8], scales[8], biases[8];
        unpack(load_pack<8>(pack), values);
        problem.norm_weight.template load<8>(col, scales);
        problem.norm_bias.template load<8>(col, biases);
#pragma unroll
        for (int at = 0; at < 8; ++at) {
          const float value = centered ? values[at] - found.x : values[at];
          values[at] = fma(value * found.y, scales[at], biases[at]);
        }
        store_pack<8>(pack, repack<T>(values));
      });
    }
    __syncthreads();
  }
};
