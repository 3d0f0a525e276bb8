// slice.cuh -- the columns of a row that one block of a cluster owns
#pragma once
#include "tile.cuh"

// Columns [first_col, last_col) of a row.
struct Slice {
  int first_col;
  int last_col;

  __device__ __forceinline__ int size() const { return last_col - first_col; }
};

// Divides columns into `shares` parts in steps of `step` and returns part `rank`. The sizes differ
// by at most one step; the last parts are the larger ones.
template <int shares, int step>
__device__ __forceinline__ Slice share_of(Slice whole, int rank) {
  const int num_steps = (whole.size() + step - 1) / step;
  const int fewest = num_steps / shares, num_small = shares - num_steps % shares;
  const int first = rank * fewest + max(rank - num_small, 0);
  const int last = first + fewest + (rank >= num_small);
  return {min(whole.first_col + first * step, whole.last_col),
          min(whole.first_col + last * step, whole.last_col)};
}

// The most columns that share_of gives to one part.
template <int shares, int step>
__device__ __forceinline__ int largest_share(int size) {
  return (size + shares * step - 1) / (shares * step) * step;
}

// The columns that block `rank` of its cluster owns. Steps of 8 packs keep the slices apart by
// whole cache lines: the copy engine reads a line twice if two slices share it.
template <Tile tile>
__device__ __forceinline__ Slice slice(int num_cols, int rank) {
  return share_of<tile.cluster_size, 8 * tile.pack_size>({0, num_cols}, rank);
}
