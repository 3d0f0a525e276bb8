// fragment_sums.cuh -- mean and rstd of rows of x whose fragments pass through the registers
//
// The fragments are those that the tensor cores multiply (warpgroup_product.cuh), so a lane has a
// quarter of two rows, and its sums of a row are the rows of its results. Sums are of x minus the
// mean of the row's first eight elements: a large mean costs no accuracy.
#pragma once
#include "convert.cuh"
#include "mean_rstd.cuh"
#include "product_memory.cuh"

// mean and rstd of the lane's two rows.
struct TwoRows {
  float mean[2];
  float rstd[2];
};

template <class T, bool centered>
struct FragmentSums {
  float first[2], sum[2], squares[2];

  // a: the first fragments of the rows.
  __device__ __forceinline__ void begin(const unsigned (&a)[4]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float values[2];
      values_of(a[row], values);
      constexpr float share = 0.125f;
      first[row] = centered ? over_lanes(values[0] * share + values[1] * share) : 0.0f;
      sum[row] = squares[row] = 0.0f;
    }
  }

  // Fragments of step_cols columns, of which num_cols are in the row, a multiple of 8.
  __device__ __forceinline__ void add(const unsigned (&a)[step_cols / 16][4], long long num_cols) {
    if (num_cols >= step_cols)
      add<true>(a, num_cols);
    else
      add<false>(a, num_cols);
  }

  __device__ __forceinline__ TwoRows finish(long long num_cols, double eps) const {
    TwoRows rows;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const Sum<float, 2> total = {{over_lanes(sum[row]), over_lanes(squares[row])}};
      const float count = static_cast<float>(num_cols);
      const auto mean_rstd = centered ? corrected(first[row], total, count, eps)
                                      : uncentered(total.part[1], 1.0f / count, eps);
      rows.mean[row] = mean_rstd.mean;
      rows.rstd[row] = mean_rstd.rstd;
    }
    return rows;
  }

 private:
  template <bool whole>
  __device__ __forceinline__ void add(const unsigned (&a)[step_cols / 16][4], long long num_cols) {
#pragma unroll
    for (int part = 0; part < step_cols / 8; ++part) {
      if (!whole && part * 8 >= num_cols) break;
#pragma unroll
      for (int row = 0; row < 2; ++row) add(row, a[part / 2][part % 2 * 2 + row]);
    }
  }
  __device__ __forceinline__ static void values_of(unsigned word, float (&values)[2]) {
    Pack<T, 2> pack;
    pack.word[0] = word;
    unpack(pack, values);
  }
  __device__ __forceinline__ void add(int row, unsigned word) {
    float values[2];
    values_of(word, values);
#pragma unroll
    for (int at = 0; at < 2; ++at) {
      const float value = centered ? values[at] - first[row] : values[at];
      if constexpr (centered) sum[row] += value;
      squares[row] = fma(value, value, squares[row]);
    }
  }
  // Over the four lanes that share a row.
  __device__ __forceinline__ static float over_lanes(float value) {
    value += __shfl_xor_sync(0xffffffffu, value, 2);
    return value + __shfl_xor_sync(0xffffffffu, value, 1);
  }
};
