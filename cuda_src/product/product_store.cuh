// product_store.cuh -- norm_linear.cu: a warp's 16 x 256 results, scaled and written
#pragma once
#include "convert.cuh"
#include "known_rows.cuh"
#include "product_memory.cuh"
#include "warpgroup.cuh"

// d: as multiply leaves it. rows: of the lane. Of y, row and col are the warp's first ones. stage:
// of the terms. Nothing waits for the copy engine but for patches of the last tile.
template <class T>
__device__ __forceinline__ void store_results(const float (&d)[128], const TwoRows& rows,
                                              ProductMemory& memory, unsigned stage,
                                              const TensorMap& y, int row, int col,
                                              long long num_cols) {
  const unsigned lane = threadIdx.x % 32, warp = (threadIdx.x - threads_per_group) / 32;
  const unsigned own_row = lane % 16, own_unit = lane / 16;  // which the lane addresses
#pragma unroll
  for (int part = 0; part < block_cols / patch_cols; ++part) {
    unsigned char* patch = memory.patch(warp, stage, part);
    if (part == 2) {
      if (lane == 0) tile_stores_wait<2>();
      __syncwarp();
    }
#pragma unroll
    for (int pair = 0; pair < patch_cols / 16; ++pair) {
      unsigned fragment[4];
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        const float* own = d + (part * patch_cols + pair * 16) / 2 + at * 2;
        const float values[2] = {own[0] * rows.rstd[at % 2], own[1] * rows.rstd[at % 2]};
        fragment[at] = repack<T>(values).word[0];
      }
      store_fragment(patch + own_row * 128 + ((pair * 2 + own_unit) ^ (own_row & 7)) * 16,
                     fragment);
    }
    fence_tile_store();
    __syncwarp();
    if (lane == 0) {
      if (col + part * patch_cols < num_cols) tile_store(y, col + part * patch_cols, row, patch);
      tile_stores_commit();
    }
  }
}
