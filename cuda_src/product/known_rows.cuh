// known_rows.cuh -- norm_linear.cu: mean and rstd, from the warps that compute them to the others
//
// A row's mean and rstd are one word of 8 bytes in global memory, so that they are seen together,
// without a fence. 0: not computed yet. rstd, the upper half, is never negative: its sign bit says
// that the word is there.
#pragma once
#include "types.cuh"

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
