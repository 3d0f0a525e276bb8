// grid_row.cuh -- one block's slice of a row that all blocks of the grid share
//
// Worker t of num_workers has the packs t, t + num_workers, ... of the slice. The first
// packs_per_thread of them come to shared memory by asynchronous copies, in the place that its turn
// has there, and stay. Any others are read again, from the L2 cache. A thread reads only what it
// has copied itself, so no barrier is needed.
#pragma once
#include "cluster.cuh"
#include "memory.cuh"
#include "slice.cuh"

template <class X, Tile tile>
struct GridRow {
  static constexpr int pack_size = tile.pack_size;
  // Two warps exchange sums (grid_exchange.cuh).
  static constexpr int num_workers = tile.threads_per_row - 64;
  static constexpr int step = num_workers * pack_size;
  static constexpr int kept_bytes = tile.packs_per_thread * step * static_cast<int>(sizeof(X));

  const X* slice_start;
  X* kept;

  // places: of all turns in shared memory, place_bytes from one to the next.
  template <class Load>
  __device__ __forceinline__ GridRow(const Load& load, long long turn, Slice cols,
                                     unsigned char* places, int place_bytes)
      : slice_start(load.row_start(turn) + cols.first_col),
        kept(reinterpret_cast<X*>(places + turn % tile.stages * place_bytes)) {}

  // The row in the same place whose elements are `offset` further on.
  __device__ __forceinline__ GridRow at(long long offset) const {
    GridRow other = *this;
    other.slice_start += offset;
    return other;
  }
  // `col` is a column of the slice, that of the thread's pack number `pack`.
  __device__ __forceinline__ Pack<X, pack_size> load(int pack, int col) const {
    return load_pack<pack_size>((pack < tile.packs_per_thread ? kept : slice_start) + col);
  }
  // Starts the copy of a pack.
  __device__ __forceinline__ void copy(int pack, int col) const {
    if (pack < tile.packs_per_thread) async_copy<pack_size>(kept + col, slice_start + col);
  }
};

// The packs pack, pack + 1, ... of this thread: the loads of all `count` start before the first
// use.
template <Tile tile, int count, class Load, class F>
__device__ __forceinline__ void slice_packs(int pack, Load load, F f) {
  constexpr int step = GridRow<float, tile>::step;
  const int col = pack * step + static_cast<int>(threadIdx.x) * tile.pack_size;
  decltype(load(0, 0)) loaded[count];
#pragma unroll
  for (int index = 0; index < count; ++index)
    loaded[index] = load(pack + index, col + index * step);
#pragma unroll
  for (int index = 0; index < count; ++index) f(pack + index, col + index * step, loaded[index]);
}

// f(pack, col, load(pack, col)) for each pack of this thread, `ahead` of them at once.
template <Tile tile, int ahead, class Load, class F>
__device__ __forceinline__ void for_each_slice_pack(Slice cols, Load load, F f) {
  constexpr int step = GridRow<float, tile>::step;
  const int num_full = cols.size() / step / ahead * ahead;
  int pack = 0;
  for (; pack < num_full; pack += ahead) slice_packs<tile, ahead>(pack, load, f);
  const int left = cols.size() - static_cast<int>(threadIdx.x) * tile.pack_size;
  for (; pack * step < left; ++pack) slice_packs<tile, 1>(pack, load, f);
}

// f(pack, col) for each pack of this thread.
template <Tile tile, class F>
__device__ __forceinline__ void for_each_slice_pack(Slice cols, F f) {
  for_each_slice_pack<tile, 1>(
      cols, [](int, int) { return 0; }, [&](int pack, int col, int) { f(pack, col); });
}

// The columns of a slice that this thread's warp has.
template <Tile tile>
__device__ __forceinline__ int cols_of_warp(Slice cols) {
  constexpr int step = GridRow<float, tile>::step, of_warp = 32 * tile.pack_size;
  const int before = static_cast<int>(threadIdx.x) / 32 * of_warp;
  return cols.size() / step * of_warp + max(0, min(cols.size() % step - before, of_warp));
}
