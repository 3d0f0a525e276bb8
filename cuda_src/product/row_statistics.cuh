// row_statistics.cuh -- norm_linear.cu: mean and rstd of rows, by warps beside those that multiply
//
// The warps of all blocks take the next rows from a counter, and never wait for another warp. So a
// warp that multiplies may wait for any row: the warps of its own block would take it at last. Sums
// are of x minus the mean of the row's first eight elements: a large mean costs no accuracy.
//
// A row's mean and rstd are one word of 8 bytes in global memory, so that they are seen together,
// without a fence. 0: not computed yet. rstd, the upper half, is never negative: its sign bit says
// that the word is there.
#pragma once
#include "convert.cuh"
#include "memory.cuh"
#include "pack.cuh"
#include "statistics.cuh"
#include "threads.cuh"

// mean and rstd of the lane's two rows; for rstd of constant rows: FoundRow::scale.
struct TwoRows {
  float mean[2];
  float rstd[2];
};

__device__ __forceinline__ unsigned long long known_word(float mean, float rstd) {
  return static_cast<unsigned long long>(__float_as_uint(rstd) | 1u << 31) << 32 |
         __float_as_uint(mean);
}

struct KnownRows {
  unsigned long long words[2];  // of the lane's two rows

  // known: the words of all rows. Rows beyond the last one need none.
  __device__ __forceinline__ void read(const unsigned long long* known, long long first_row,
                                       long long num_rows) {
#pragma unroll
    for (int at = 0; at < 2; ++at) {
      const long long row = first_row + threadIdx.x % 32 / 4 + at * 8;
      words[at] = ~0ull;
      if (row < num_rows) words[at] = *static_cast<const volatile unsigned long long*>(known + row);
    }
  }
  // Reads until the words of all rows of the warp are there.
  __device__ __forceinline__ TwoRows wait(const unsigned long long* known, long long first_row,
                                          long long num_rows) {
    while (!__all_sync(0xffffffffu, words[0] >> 63 != 0 && words[1] >> 63 != 0))
      read(known, first_row, num_rows);
    TwoRows rows;
#pragma unroll
    for (int at = 0; at < 2; ++at) {
      rows.mean[at] = __uint_as_float(static_cast<unsigned>(words[at]));
      rows.rstd[at] = __uint_as_float(static_cast<unsigned>(words[at] >> 32) & ~(1u << 31));
    }
    return rows;
  }
};

constexpr int rows_of_turn = 4;  // of a warp at once: eight lanes have a row
constexpr int lanes_of_row = 32 / rows_of_turn;
constexpr int packs_at_once = 4;  // that a lane has loaded and not yet added

template <class T, bool centered>
struct RowSums {
  float first;
  Sum<float, 2> sums;  // of values - first, and of their squares

  __device__ __forceinline__ void add(const Pack<T, 8>& pack) {
    float values[8];
    unpack(pack, values);
#pragma unroll
    for (float value : values) {
      if constexpr (centered) sums.part[0] += value -= first;
      sums.part[1] = fma(value, value, sums.part[1]);
    }
  }
  // pack: of the row's first lane, the first elements of the row.
  __device__ __forceinline__ void begin(const Pack<T, 8>& pack) {
    float values[8], sum = 0.0f;
    unpack(pack, values);
#pragma unroll
    for (const float value : values) sum += value * 0.125f;
    first = centered ? __shfl_sync(0xffffffffu, sum, 0, lanes_of_row) : 0.0f;
    sums = {};
  }
};

// A constant row has rstd 1/sqrt(eps), which would multiply the rounding errors of its products.
// They are multiplied by this instead, so that y is the bias.
constexpr float scale_of_constant_row = 0x1p-64f;

// scale: what the products are multiplied by.
struct FoundRow {
  float mean, rstd, scale;
};

// By the lanes of a row, together with all others of the warp: its mean and rstd.
template <bool centered, class T>
__device__ __forceinline__ FoundRow statistics_of(const T* row, long long num_cols, double eps) {
  constexpr int step = lanes_of_row * 8;
  RowSums<T, centered> row_sums;
  const int own = threadIdx.x % lanes_of_row * 8;
  for (long long start = 0; start < num_cols; start += packs_at_once * step) {
    Pack<T, 8> packs[packs_at_once];
#pragma unroll
    for (int at = 0; at < packs_at_once; ++at) {
      const long long col = start + at * step + own;
      load_once(packs[at], row + col, col < num_cols);
    }
    if (start == 0) row_sums.begin(packs[0]);
#pragma unroll
    for (int at = 0; at < packs_at_once; ++at)
      if (start + at * step + own < num_cols) row_sums.add(packs[at]);
  }
  const auto sums = warp_reduce<lanes_of_row>(row_sums.sums);
  const float count = static_cast<float>(num_cols);
  const RowStatistics<float> found = centered ? corrected(row_sums.first, sums, count, eps)
                                              : uncentered(sums.part[1], 1.0f / count, eps);
  const bool is_constant = centered && sums.part[1] == 0;
  return {found.mean, found.rstd, is_constant ? scale_of_constant_row : found.rstd};
}

// call.next_row: how many rows are taken already.
template <bool centered, class Call>
__device__ __forceinline__ void find_statistics(const Call& call) {
  const int lane = threadIdx.x % 32;
  await_previous_kernel();
  while (true) {
    unsigned long long next = 0;
    if (lane == 0) next = atomicAdd(call.next_row, static_cast<unsigned long long>(rows_of_turn));
    next = __shfl_sync(0xffffffffu, next, 0);
    if (next >= call.num_rows) return;
    // Beyond the last row: the last row again.
    const long long row = min(next + lane / lanes_of_row, call.num_rows - 1);
    const auto found =
        statistics_of<centered>(call.x_rows + row * call.in_features, call.in_features, call.eps);
    if (lane % lanes_of_row != 0) continue;
    if (call.mean != nullptr) call.mean[row] = found.mean;
    if (call.rstd != nullptr) call.rstd[row] = found.rstd;
    *static_cast<volatile unsigned long long*>(call.known + row) =
        known_word(found.mean, found.scale);
  }
}
