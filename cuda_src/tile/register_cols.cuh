// register_cols.cuh -- the columns of a row that a block of a cluster and a thread have
#pragma once
#include "convert.cuh"
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

// Where pack `pack` of this thread begins in its block's columns. Neighbouring threads take
// neighbouring packs.
template <Tile tile>
__device__ __forceinline__ int register_col(int pack) {
  // An unsigned remainder lets the compiler derive the addresses of all packs from one. A signed
  // one gives each pack its own address: faster for single elements, and it saves registers where a
  // row does not fill its lanes. If a block has one row, a power of two makes the remainder a mask.
  constexpr bool is_signed = tile.pack_size == 1 || (tile.rows_per_block > 1 && !tile.exact);
  constexpr int divisor =
      tile.rows_per_block > 1 ? tile.threads_per_row : power_of_two_from(tile.threads_per_row);
  const int thread = is_signed ? static_cast<int>(threadIdx.x) % tile.threads_per_row
                               : static_cast<int>(threadIdx.x % divisor);
  return (pack * tile.threads_per_row + thread) * tile.pack_size;
}

// Only a thread's last pack can lie beyond the block's columns, and none if the columns fill the
// tile.
template <Tile tile>
__device__ __forceinline__ bool register_pack_in_row(int pack, int num_cols) {
  if constexpr (tile.exact) return true;
  return pack < tile.packs_per_thread - 1 || register_col<tile>(pack) < num_cols;
}

// A float sum of so many values of about one magnitude is exact: it is less than 2^24 times their
// last bit. They may lie on both sides of a power of two, which costs one bit.
template <class Held>
constexpr int most_exact_cols = is_same<Held, __nv_bfloat16> ? 1 << 15
                                : is_same<Held, __half>      ? 1 << 12
                                                             : 0;
