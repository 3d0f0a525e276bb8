// known_rows.cuh -- norm_linear.cu: statistics of rows that another block has computed already
//
// A row's mean and rstd are one word of 8 bytes in global memory, so that they are seen together,
// without a fence. 0: not computed yet, or rstd is 0; the reader then computes them itself. They
// are the same bits, whichever block computes them.
#pragma once
#include "fragment_sums.cuh"

struct KnownRows {
  unsigned long long words[2];  // of the lane's two rows

  // statistics: null, or the words of all rows. Rows beyond the last one need no statistics.
  __device__ __forceinline__ void read(const unsigned long long* statistics, long long first_row,
                                       long long num_rows) {
#pragma unroll
    for (int at = 0; at < 2; ++at) {
      const long long row = first_row + threadIdx.x % 32 / 4 + at * 8;
      words[at] = row < num_rows ? 0 : ~0ull;
      if (statistics != nullptr && row < num_rows)
        words[at] = *static_cast<const volatile unsigned long long*>(statistics + row);
    }
  }
  // Whether the statistics of all rows of the warp were there.
  __device__ __forceinline__ bool all() const {
    return __all_sync(0xffffffffu, words[0] >> 32 != 0 && words[1] >> 32 != 0);
  }
  __device__ __forceinline__ TwoRows rows() const {
    TwoRows rows;
#pragma unroll
    for (int at = 0; at < 2; ++at) {
      rows.mean[at] = __uint_as_float(static_cast<unsigned>(words[at]));
      rows.rstd[at] = __uint_as_float(static_cast<unsigned>(words[at] >> 32));
    }
    return rows;
  }
};

// Writes what this warp computed; mean, rstd and statistics may be null.
__device__ __forceinline__ void save_statistics(const TwoRows& rows, float* mean, float* rstd,
                                                unsigned long long* statistics, long long first_row,
                                                long long num_rows) {
  if (threadIdx.x % 4 != 0) return;
#pragma unroll
  for (int at = 0; at < 2; ++at) {
    const long long row = first_row + threadIdx.x % 32 / 4 + at * 8;
    if (row >= num_rows) continue;
    if (mean != nullptr) mean[row] = rows.mean[at];
    if (rstd != nullptr) rstd[row] = rows.rstd[at];
    if (statistics != nullptr)
      *static_cast<volatile unsigned long long*>(statistics + row) =
          static_cast<unsigned long long>(__float_as_uint(rows.rstd[at])) << 32 |
          __float_as_uint(rows.mean[at]);
  }
}
