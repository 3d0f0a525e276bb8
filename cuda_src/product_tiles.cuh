// product_tiles.cuh -- norm_linear.cu: the order of the tiles of y
//
// Clusters take tiles in turns. What runs at a time should read few rows of x and of weight, so
// that the L2 cache reads them once, and few columns of tiles, because the first ones to read a row
// find its statistics.
#pragma once
#include "product_memory.cuh"

// A tile is the block_cols columns of y from col, and block_rows rows for each block of a cluster.
struct ProductTiles {
  unsigned strips;  // tiles along the rows
  unsigned across;  // tiles along the columns
  unsigned strips_at_a_time;

  __device__ __forceinline__ ProductTiles(long long num_rows, long long num_cols, int rows_of_tile,
                                          unsigned strips_at_a_time)
      : strips((num_rows + rows_of_tile - 1) / rows_of_tile),
        across((num_cols + block_cols - 1) / block_cols),
        strips_at_a_time(strips_at_a_time) {}

  __device__ __forceinline__ unsigned count() const { return strips * across; }
  // Where tile number `turn` is: a strip, and a tile across. Of a turn beyond the last, the last.
  __device__ __forceinline__ void find(unsigned turn, unsigned& strip, unsigned& place) const {
    turn = turn < count() ? turn : count() - 1;
    const unsigned first = turn / (strips_at_a_time * across) * strips_at_a_time;
    const unsigned left = strips - first;
    const unsigned height = left < strips_at_a_time ? left : strips_at_a_time;
    const unsigned rest = turn - first * across;
    strip = first + rest % height;
    place = rest / height;
  }
};
