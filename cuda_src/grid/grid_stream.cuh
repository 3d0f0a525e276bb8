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

  // This thread's first pack of the row that is prefetched, and of the one that is copied.
  const X *prefetched, *copied;

  template <class Load>
  __device__ __forceinline__ void begin_prefetches(const Load& load, long long turn, Slice cols) {
    prefetched = first_pack(load, turn, cols);
  }
  __device__ __forceinline__ void prefetch(int pack) const {
    prefetch_line(prefetched + pack * Shape::step);
  }
  template <class Load>
  __device__ __forceinline__ void begin_copies(const Load& load, long long turn, Slice cols) {
    copied = first_pack(load, turn, cols);
  }
  __device__ __forceinline__ void copy(int pack, int place) const {
    async_copy<pack_size, leaves_first>(at(place), copied + pack * Shape::step);
  }
  __device__ __forceinline__ Pack<X, pack_size> load(int place) const {
    return load_pack<pack_size>(at(place));
  }

 private:
  template <class Load>
  __device__ __forceinline__ static const X* first_pack(const Load& load, long long turn,
                                                        Slice cols) {
    return load.row_start(Shape::row(turn)) + cols.first_col + Shape::col(0);
  }
  __device__ __forceinline__ static X* at(int place) {
    return reinterpret_cast<X*>(dynamic_smem() + first_byte + place) + threadIdx.x * pack_size;
  }
};
