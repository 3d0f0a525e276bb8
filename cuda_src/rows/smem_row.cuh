// smem_row.cuh -- a row, or one block's slice of it, in shared memory
//
// A thread reads only the packs that it has written itself, so no barrier is needed. The members
// are those of every row (uncached_row.cuh).
#pragma once
#include "register_row.cuh"
#include "tile.cuh"

// f(col) for each pack of this thread: neighbouring threads take neighbouring packs of the slice.
template <Tile tile, class F>
__device__ __forceinline__ void for_each_own_col(Slice cols, F f) {
  for (int col = cols.first_col + threadIdx.x * tile.pack_size; col < cols.last_col;
       col += tile.threads_per_row * tile.pack_size) {
    f(col);
  }
}

template <class Held, class Compute, Tile tile>
struct SmemRow {
  static constexpr int pack_size = tile.pack_size;
  static constexpr bool has_exact_sums = false, adds_equals_exactly = false;
  static constexpr int num_summed_packs = 0;
  static constexpr int num_kept_results = 0;

  Held* held;
  Slice cols{};

  __device__ __forceinline__ explicit SmemRow(unsigned char* smem)
      : held(reinterpret_cast<Held*>(smem)) {}

  template <class Load>
  __device__ __forceinline__ void fetch(const Load& load, long long row, Slice columns) {
    cols = columns;
    for_each_own_col<tile>(cols, [&](int col) {
      store_pack<pack_size>(held + (col - cols.first_col), load.template load<pack_size>(row, col));
    });
  }

  template <class F>
  __device__ __forceinline__ void for_each_pack(F f) const {
    for_each_own_col<tile>(cols, [&](int col) {
      Compute values[pack_size];
      unpack(load_pack<pack_size>(held + (col - cols.first_col)), values);
      f(col, values);
    });
  }
  template <class F>
  __device__ __forceinline__ void for_each_pack_padded(F f) const {
    for_each_pack([&](int col, const auto& values) { f(col, values, true); });
  }
  template <class LoadMore, class F>
  __device__ __forceinline__ void for_each_pack_with(LoadMore load_more, F f) const {
    for_each_pack([&](int col, const auto& values) { f(col, values, true, load_more(col)); });
  }
};

// The row of a kernel that keeps it in registers or, on path smem, in `smem`.
template <class Load, Tile tile>
__device__ __forceinline__ auto row_on_chip(unsigned char* smem) {
  if constexpr (tile.path == Path::smem) {
    return SmemRow<typename Load::Held, typename Load::Compute, tile>(smem);
  } else {
    return RegisterRow<Load, tile>{};
  }
}
