// grid_stream.cuh -- a tensor whose packs travel through shared memory, on path `grid`
#pragma once
#include "grid_shape.cuh"
#include "memory.cuh"

// A place has one pack of each worker. The first place begins at first_byte; `place` is another
// one's distance from it in bytes.
template <class X, Tile tile, int first_byte, bool leaves_first = false>
struct GridStream {
  using Shape = GridShape<tile>;
  static constexpr int pack_size = tile.pack_size;
  static constexpr int place_bytes = Shape::step * static_cast<int>(sizeof(X));
  static constexpr int last_byte = first_byte + place_bytes;

  const X* copied;  // this thread's first pack of the row that is copied

  template <class Load>
  __device__ __forceinline__ void begin_copies(const Load& load, long long turn, Slice cols) {
    copied = load.row_start(Shape::row(turn)) + cols.first_col + Shape::col(0);
  }
  __device__ __forceinline__ void copy(int pack, int place) const {
    async_copy<pack_size, leaves_first>(at(place), copied + pack * Shape::step);
  }
  __device__ __forceinline__ Pack<X, pack_size> load(int place) const {
    return load_pack<pack_size>(at(place));
  }

 private:
  __device__ __forceinline__ static X* at(int place) {
    return reinterpret_cast<X*>(dynamic_smem() + first_byte + place) + threadIdx.x * pack_size;
  }
};
