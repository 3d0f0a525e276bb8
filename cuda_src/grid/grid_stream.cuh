// grid_stream.cuh -- tensors whose packs travel through shared memory, on path `grid`
#pragma once
#include "grid_shape.cuh"
#include "memory.cuh"

// A place has one pack of each worker, of x and dy one each. The first place begins at first_byte;
// `place` is another one's distance from it in bytes. Load: that of load.cuh.
template <class Load, Tile tile, int first_byte, bool leaves_first = false>
struct GridStream {
  using X = typename Load::Held;
  using Shape = GridShape<tile>;
  static constexpr int pack_size = tile.pack_size;
  using Loaded = Pack<X, pack_size>;
  static constexpr int place_bytes = Shape::step * static_cast<int>(sizeof(X));
  static constexpr int end_byte = first_byte + place_bytes;

  const Load& rows;
  int first_col;  // of the slice
  // This thread's first pack of the row that is prefetched, and of the one that is copied.
  // Undefined until the first step of a row begins.
  const X *prefetched, *copied;

  __device__ __forceinline__ GridStream(const Load& rows, Slice cols)
      : rows(rows), first_col(cols.first_col) {}
  __device__ __forceinline__ void begin_prefetches(long long turn) {
    prefetched = first_pack(turn);
  }
  __device__ __forceinline__ void prefetch(int pack) const {
    prefetch_line(prefetched + pack * Shape::step);
  }
  __device__ __forceinline__ void begin_copies(long long turn) { copied = first_pack(turn); }
  __device__ __forceinline__ void copy(int pack, int place) const {
    async_copy<pack_size, leaves_first>(at(place), copied + pack * Shape::step);
  }
  __device__ __forceinline__ Loaded load(int place) const {
    return load_pack<pack_size>(at(place));
  }
  // From global memory. col: in the slice.
  __device__ __forceinline__ Loaded load_again(long long turn, int col) const {
    return rows.template load<pack_size>(Shape::row(turn), first_col + col);
  }

 private:
  __device__ __forceinline__ const X* first_pack(long long turn) const {
    return rows.row_start(Shape::row(turn)) + (first_col + Shape::col(0));
  }
  __device__ __forceinline__ static X* at(int place) {
    return reinterpret_cast<X*>(dynamic_smem() + first_byte + place) + threadIdx.x * pack_size;
  }
};

// x and dy of backward.
template <class LoadX, class LoadDy, Tile tile, int first_byte>
struct GridStreamPair {
  using X = GridStream<LoadX, tile, first_byte>;
  using Dy = GridStream<LoadDy, tile, X::end_byte>;
  static constexpr int place_bytes = X::place_bytes + Dy::place_bytes;
  struct Loaded {
    typename X::Loaded x;
    typename Dy::Loaded dy;
  };

  X x;
  Dy dy;

  __device__ __forceinline__ GridStreamPair(const LoadX& xs, const LoadDy& dys, Slice cols)
      : x(xs, cols), dy(dys, cols) {}
  __device__ __forceinline__ void begin_prefetches(long long turn) {
    x.begin_prefetches(turn);
    dy.begin_prefetches(turn);
  }
  __device__ __forceinline__ void prefetch(int pack) const {
    x.prefetch(pack);
    dy.prefetch(pack);
  }
  __device__ __forceinline__ void begin_copies(long long turn) {
    x.begin_copies(turn);
    dy.begin_copies(turn);
  }
  __device__ __forceinline__ void copy(int pack, int place) const {
    x.copy(pack, place);
    dy.copy(pack, place);
  }
  __device__ __forceinline__ Loaded load(int place) const {
    return {x.load(place), dy.load(place)};
  }
  __device__ __forceinline__ Loaded load_again(long long turn, int col) const {
    return {x.load_again(turn, col), dy.load_again(turn, col)};
  }
};
