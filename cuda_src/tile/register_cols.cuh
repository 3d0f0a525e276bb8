// register_cols.cuh -- which columns of a row a thread keeps in registers
#pragma once
#include "convert.cuh"
#include "slice.cuh"

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
