// product_store.cuh -- norm_linear.cu: a warp's 16 x 256 results, written during the next tile
#pragma once
#include "convert.cuh"
#include "known_rows.cuh"
#include "product_memory.cuh"

// Results wait in registers, rounded, and are written a part at a time, while tensor cores compute
// the next tile. fold_weight.cu orders the columns so that a lane has 8 adjacent ones of each 32.
template <class T>
struct Results {
  static constexpr int num_parts = 4, packs_of_part = block_cols / 32 / num_parts;
  Pack<T, 8> packs[num_parts][packs_of_part][2];  // the last index: which of the lane's two rows
  int row, col;  // of y, the warp's first ones; col: at first beyond the last one

  // d: as multiply leaves it. rows: of the lane.
  __device__ __forceinline__ void take(const float (&d)[128], const TwoRows& rows) {
#pragma unroll
    for (int at = 0; at < num_parts * packs_of_part * 2; ++at) {
      float values[8];
#pragma unroll
      for (int col = 0; col < 8; ++col)
        values[col] = d[at / 2 * 16 + col / 2 * 4 + at % 2 * 2 + col % 2] * rows.rstd[at % 2];
      packs[at / 2 / packs_of_part][at / 2 % packs_of_part][at % 2] = repack<T>(values);
    }
  }
  __device__ __forceinline__ void write(int part, T* y, long long num_rows,
                                        long long num_cols) const {
    const int lane = threadIdx.x % 32;
    const long long first = row + lane / 4;
    const int own = col + part * packs_of_part * 32 + lane % 4 * 8;
    y += first * num_cols + own;
#pragma unroll
    for (int at = 0; at < num_parts; ++at) {
      if (at != part) continue;
#pragma unroll
      for (int pack = 0; pack < packs_of_part; ++pack)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (first + half * 8 < num_rows && own + pack * 32 < num_cols)
            store_pack<8>(y + half * 8 * num_cols + pack * 32, packs[at][pack][half]);
    }
  }
};
