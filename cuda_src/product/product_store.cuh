// product_store.cuh -- norm_linear.cu: a warp's 16 x 256 results, written during the next tile
#pragma once
#include "convert.cuh"
#include "known_rows.cuh"
#include "product_memory.cuh"
#include "warpgroup.cuh"

// Results wait as words of two elements, in registers, and are written a part of 64 columns at a
// time, while tensor cores compute the next tile.
struct Results {
  static constexpr int num_parts = block_cols / patch_cols, words_of_part = patch_cols / 4;
  unsigned words[num_parts * words_of_part];
  int row, col;  // of y, the warp's first ones; col: at first beyond the last one

  // d: as multiply leaves it. rows: of the lane.
  template <class T>
  __device__ __forceinline__ void take(const float (&d)[128], const TwoRows& rows) {
#pragma unroll
    for (int at = 0; at < 64; ++at) {
      const float rstd = rows.rstd[at % 2], values[2] = {d[at * 2] * rstd, d[at * 2 + 1] * rstd};
      words[at] = repack<T>(values).word[0];
    }
  }
  // Waits for the copy engine only where it still reads the part before the last one.
  __device__ __forceinline__ void write(int part, ProductMemory& memory, const TensorMap& y,
                                        long long num_cols) const {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32 - threads_per_group / 32;
    const unsigned own_row = lane % 16, own_unit = lane / 16;  // which the lane addresses
    unsigned char* patch = memory.patches[warp][part % 2];
    if (lane == 0) tile_stores_wait<1>();
    __syncwarp();
#pragma unroll
    for (int at = 0; at < num_parts; ++at) {
      if (at != part) continue;
#pragma unroll
      for (int pair = 0; pair < patch_cols / 16; ++pair) {
        const unsigned* own = words + at * words_of_part + pair * 4;
        const unsigned fragment[4] = {own[0], own[1], own[2], own[3]};
        store_fragment(patch + own_row * 128 + ((pair * 2 + own_unit) ^ (own_row & 7)) * 16,
                       fragment);
      }
    }
    fence_tile_store();
    __syncwarp();
    if (lane == 0) {
      if (col + part * patch_cols < num_cols) tile_store(y, col + part * patch_cols, row, patch);
      tile_stores_commit();
    }
  }
};
