// product_tiles.cuh -- norm_linear.cu: the order of the tiles of y
//
// Clusters take tiles in turns. What runs at a time should read few rows of x and of weight, so
// that the L2 cache reads them once.
#pragma once
#include "product_memory.cuh"

// block_cols columns of y, and block_rows rows for each block of a cluster.
struct ProductTile {
  unsigned strip;  // along the rows
  unsigned place;  // along the columns
};

struct ProductTiles {
  unsigned strips;  // tiles along the rows
  unsigned across;  // tiles along the columns
  unsigned strips_at_a_time;
  // Turns of whole tiles. Where the last tiles would leave half of the clusters without work, two
  // clusters compute one tile: each leaves one of its warpgroups idle, and takes half the time.
  unsigned whole;

  __device__ __forceinline__ ProductTiles(long long num_rows, long long num_cols, int rows_of_tile,
                                          unsigned strips_at_a_time, unsigned num_clusters)
      : strips((num_rows + rows_of_tile - 1) / rows_of_tile),
        across((num_cols + block_cols - 1) / block_cols),
        strips_at_a_time(strips_at_a_time),
        whole(strips * across) {
    const unsigned last = whole % num_clusters;
    if (last * 2 <= num_clusters) whole -= last;
  }

  __device__ __forceinline__ unsigned num_turns() const { return strips * across * 2 - whole; }
  __device__ __forceinline__ bool computes(unsigned group, unsigned turn) const {
    return turn < whole || (turn - whole) % 2 == group;
  }
  __device__ __forceinline__ ProductTile find(unsigned turn) const {
    ProductTile tile;
    if (turn >= whole) turn = whole + (turn - whole) / 2;
    const unsigned first = turn / (strips_at_a_time * across) * strips_at_a_time;
    const unsigned left = strips - first;
    const unsigned height = left < strips_at_a_time ? left : strips_at_a_time;
    const unsigned rest = turn - first * across;
    tile.strip = first + rest % height;
    tile.place = rest / height;
    return tile;
  }
};
