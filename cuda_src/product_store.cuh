// product_store.cuh -- norm_linear.cu: a warp's 16 x 256 results, normalised and written
#pragma once
#include "convert.cuh"
#include "fragment_sums.cuh"
#include "warpgroup.cuh"

// d: as multiply leaves it. rows: of the lane. Of y, row and col are the warp's first ones. The
// copy engine reads one of the two patches while the warp writes the other.
template <class T, bool centered>
__device__ __forceinline__ void store_results(const float (&d)[128], const TwoRows& rows,
                                              const ColumnTerms* terms,
                                              unsigned char (&patches)[2][patch_bytes],
                                              const TensorMap& y, int row, int col,
                                              long long num_cols) {
  const unsigned lane = threadIdx.x % 32;
  const unsigned own_row = lane % 16, own_unit = lane / 16;  // which the lane addresses
  float shift[2];
#pragma unroll
  for (int at = 0; at < 2; ++at) shift[at] = -rows.mean[at] * rows.rstd[at];
#pragma unroll
  for (int part = 0; part < block_cols / patch_cols; ++part) {
    if (col + part * patch_cols >= num_cols) break;
    unsigned char* patch = patches[part % 2];
    if (lane == 0) tile_stores_wait<1>();
    __syncwarp();
#pragma unroll
    for (int pair = 0; pair < patch_cols / 16; ++pair) {
      unsigned fragment[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int tile_of_8 = (part * patch_cols / 16 + pair) * 2 + half;
        const float4 two = *reinterpret_cast<const float4*>(terms + tile_of_8 * 8 + lane % 4 * 2);
#pragma unroll
        for (int at = 0; at < 2; ++at) {
          const float first = centered ? fma(shift[at], two.x, two.y) : two.y;
          const float second = centered ? fma(shift[at], two.z, two.w) : two.w;
          const float values[2] = {fma(d[tile_of_8 * 4 + at * 2], rows.rstd[at], first),
                                   fma(d[tile_of_8 * 4 + at * 2 + 1], rows.rstd[at], second)};
          fragment[half * 2 + at] = repack<T>(values).word[0];
        }
      }
      store_fragment(patch + own_row * 128 + ((pair * 2 + own_unit) ^ (own_row & 7)) * 16,
                     fragment);
    }
    fence_tile_store();
    __syncwarp();
    if (lane == 0) {
      tile_store(y, col + part * patch_cols, row, patch);
      tile_stores_commit();
    }
  }
}
