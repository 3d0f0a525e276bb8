// grid_row.cuh -- one block's slice of a row that the blocks of a group share
//
// Worker t has the packs t, t + num_workers, ... of the slice. The first packs_per_thread of them
// come to shared memory by asynchronous copies, in the place that its turn has there, and stay. Any
// others are read again, from the L2 cache. A thread reads only what it has copied itself, so no
// barrier is needed. Its packs are copied in groups of a few; it waits for one group at a time.
#pragma once
#include "grid_shape.cuh"
#include "memory.cuh"

// The number of a pack of a thread. kept: whether it is one of the first packs_per_thread; the
// compiler knows their numbers.
template <bool kept>
struct PackNumber {
  int number;
};

template <class X, Tile tile>
struct GridRow {
  using Shape = GridShape<tile>;
  static constexpr int pack_size = tile.pack_size;
  static constexpr int kept_bytes =
      tile.packs_per_thread * Shape::step * static_cast<int>(sizeof(X));

  const X* slice_start;
  const X* later_start;  // the same of the row that takes this one's place
  X* place;

  // places: of all turns in shared memory, place_bytes from one to the next.
  template <class Load>
  __device__ __forceinline__ GridRow(const Load& load, long long turn, Slice cols,
                                     unsigned char* places, int place_bytes)
      : slice_start(load.row_start(Shape::row(turn)) + cols.first_col),
        later_start(slice_start + load.stride(0) * tile.stages * Shape::num_groups()),
        place(reinterpret_cast<X*>(places + turn % tile.stages * place_bytes)) {}

  // `col` is a column of the slice, that of the thread's pack number `pack`.
  template <bool kept>
  __device__ __forceinline__ Pack<X, pack_size> load(PackNumber<kept>, int col) const {
    return load_pack<pack_size>((kept ? place : slice_start) + col);
  }
  // Starts the copy of a pack of this row, or of the later one.
  template <bool kept>
  __device__ __forceinline__ void copy(PackNumber<kept>, int col) const {
    if constexpr (kept) async_copy<pack_size>(place + col, slice_start + col);
  }
  template <bool kept>
  __device__ __forceinline__ void copy_later(PackNumber<kept>, int col) const {
    if constexpr (kept) async_copy<pack_size>(place + col, later_start + col);
  }
};

// f(pack, col, load(pack, col)) for each pack of this thread. The loads of `ahead` packs start
// before the first use. after(): after each `ahead` of the first packs_per_thread.
template <Tile tile, int ahead, class Load, class F, class After>
__device__ __forceinline__ void for_each_slice_pack(Slice cols, Load load, F f, After after) {
  constexpr int step = GridShape<tile>::step, num_kept = tile.packs_per_thread;
  const int first = static_cast<int>(threadIdx.x) * tile.pack_size, left = cols.size() - first;
  const auto present = [&]<bool kept>(PackNumber<kept> pack) {
    if constexpr (kept && tile.exact) return pack.number < num_kept;
    return (!kept || pack.number < num_kept) && pack.number * step < left;
  };
  const auto take = [&]<bool kept>(PackNumber<kept> from) {
    decltype(load(from, 0)) loaded[ahead];
#pragma unroll
    for (int at = 0; at < ahead; ++at) {
      const PackNumber<kept> pack{from.number + at};
      if (present(pack)) loaded[at] = load(pack, first + pack.number * step);
    }
#pragma unroll
    for (int at = 0; at < ahead; ++at) {
      const PackNumber<kept> pack{from.number + at};
      if (present(pack)) f(pack, first + pack.number * step, loaded[at]);
    }
  };
#pragma unroll
  for (int pack = 0; pack < num_kept; pack += ahead) {
    take(PackNumber<true>{pack});
    after();
  }
  for (int pack = num_kept; pack * step < left; pack += ahead) take(PackNumber<false>{pack});
}

// f(pack, col) for each pack of this thread.
template <Tile tile, class F>
__device__ __forceinline__ void for_each_slice_pack(Slice cols, F f) {
  for_each_slice_pack<tile, 1>(
      cols, [](auto, int) { return 0; }, [&](auto pack, int col, int) { f(pack, col); }, [] {});
}

// Starts the copies of the rows of the first turns, in groups of at_once packs. copy(turn, pack,
// col): of one pack.
template <Tile tile, int at_once, class Copy>
__device__ __forceinline__ void copy_first_rows(Slice cols, long long num_turns, Copy copy) {
  for (int turn = 0; turn < tile.stages; ++turn) {
    for_each_slice_pack<tile, at_once>(
        cols, [](auto, int) { return 0; },
        [&](auto pack, int col, int) {
          if (GridShape<tile>::works() && turn < num_turns) copy(turn, pack, col);
        },
        [] { async_commit(); });
  }
}

// async_wait<pending>. The compiler knows `pending`, at most `most`, once it has unrolled loops.
template <int most>
__device__ __forceinline__ void async_wait_for(int pending) {
  if constexpr (most > 0)
    if (pending < most) return async_wait_for<most - 1>(pending);
  async_wait<most>();
}

// Waits for the group of a pack of the row whose sums are next. The groups of stages - lag - 1
// later rows, and later groups of this row, may be pending.
template <Tile tile, int at_once, bool kept>
__device__ __forceinline__ void await_pack(PackNumber<kept> pack) {
  constexpr int groups = (tile.packs_per_thread + at_once - 1) / at_once;
  constexpr int most = groups * (tile.stages - tile.lag()) - 1;
  if constexpr (kept) async_wait_for<most>(most - pack.number / at_once);
}
