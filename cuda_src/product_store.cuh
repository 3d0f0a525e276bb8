// product_store.cuh -- norm_linear.cu: a warp's 16 x 256 results, normalised and written
#pragma once
#include "convert.cuh"
#include "fragment_sums.cuh"

// d: as multiply leaves it. rows: of the lane. y: the first row and column of the block's tile.
template <class T, bool centered>
__device__ __forceinline__ void store_results(const float (&d)[128], const TwoRows& rows,
                                              const ColumnTerms* terms, unsigned char* patch, T* y,
                                              long long stride, long long num_rows,
                                              long long num_cols) {
  const unsigned lane = threadIdx.x % 32;
  float shift[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) shift[row] = -rows.mean[row] * rows.rstd[row];
#pragma unroll
  for (int part = 0; part < block_cols / patch_cols; ++part) {
    if (part * patch_cols >= num_cols) break;
#pragma unroll
    for (int at = 0; at < patch_cols / 8; ++at) {
      const int tile_of_8 = part * (patch_cols / 8) + at;
      const int col = tile_of_8 * 8 + lane % 4 * 2;
      const float4 two = *reinterpret_cast<const float4*>(terms + col);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float first = centered ? fma(shift[row], two.x, two.y) : two.y;
        const float second = centered ? fma(shift[row], two.z, two.w) : two.w;
        const float values[2] = {fma(d[tile_of_8 * 4 + row * 2], rows.rstd[row], first),
                                 fma(d[tile_of_8 * 4 + row * 2 + 1], rows.rstd[row], second)};
        *reinterpret_cast<unsigned*>(patch + (lane / 4 + row * 8) * patch_stride +
                                     (at * 8 + lane % 4 * 2) * 2) = repack<T>(values).word[0];
      }
    }
    __syncwarp();
#pragma unroll
    for (int at = 0; at < 4; ++at) {
      const int row = at * 4 + lane / 8, col = lane % 8 * 8;
      const uint4 pack = *reinterpret_cast<const uint4*>(patch + row * patch_stride + col * 2);
      if (row < num_rows && part * patch_cols + col < num_cols)
        *reinterpret_cast<uint4*>(y + row * stride + part * patch_cols + col) = pack;
    }
    __syncwarp();
  }
}
