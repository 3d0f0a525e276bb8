// grid_sums.cuh -- a block's sums of dweight and dbias, of the same columns of all rows
#pragma once
#include "backward.cuh"
#include "backward_smem.cuh"
#include "grid_row.cuh"

// In shared memory. A thread adds to its own columns alone. Chunks of 16 bytes of a pack are apart,
// so that those of neighbouring threads are adjacent: there are no bank conflicts.
template <Gradients gradients, Tile tile>
struct GridSums {
  static constexpr int pack_size = tile.pack_size;
  static constexpr int chunk_size = pack_size < 4 ? pack_size : 4;
  static constexpr int num_chunks = pack_size / chunk_size;

  Slice cols;
  float* dweight;
  float* dbias;

  __device__ __forceinline__ GridSums(unsigned char* smem, Slice cols)
      : cols(cols),
        dweight(reinterpret_cast<float*>(smem)),
        dbias(dweight + (gradients.dweight ? cols.size() : 0)) {}

  __device__ __forceinline__ void start() const {
    for_each_slice_pack<tile>(cols, [&](int, int col) {
      for_each_chunk(col, [&](int at, int) {
        const float zeros[chunk_size] = {};
        if constexpr (gradients.dweight) store_pack<chunk_size>(dweight + at, repack<float>(zeros));
        if constexpr (gradients.dbias) store_pack<chunk_size>(dbias + at, repack<float>(zeros));
      });
    });
  }
  __device__ __forceinline__ void add(int col, const float (&x_hats)[pack_size],
                                      const float (&dys)[pack_size]) const {
    for_each_chunk(col, [&](int at, int first) {
      float products[chunk_size], of_chunk[chunk_size];
#pragma unroll
      for (int each = 0; each < chunk_size; ++each) {
        of_chunk[each] = dys[first + each];
        products[each] = dys[first + each] * x_hats[first + each];
      }
      if constexpr (gradients.dweight) add_pack(dweight + at, products);
      if constexpr (gradients.dbias) add_pack(dbias + at, of_chunk);
    });
  }
  // To one partial row of each.
  __device__ __forceinline__ void write(float* dweights, float* dbiases) const {
    for_each_slice_pack<tile>(cols, [&](int, int col) {
      for_each_chunk(col, [&](int at, int first) {
        const int to = cols.first_col + col + first;
        if constexpr (gradients.dweight)
          store_pack<chunk_size>(dweights + to, load_pack<chunk_size>(dweight + at));
        if constexpr (gradients.dbias)
          store_pack<chunk_size>(dbiases + to, load_pack<chunk_size>(dbias + at));
      });
    });
  }

 private:
  // f(at, first): at is the place of a chunk, which begins with element `first` of the pack.
  template <class F>
  __device__ __forceinline__ void for_each_chunk(int col, F f) const {
#pragma unroll
    for (int chunk = 0; chunk < num_chunks; ++chunk)
      f((chunk * cols.size() + col) / num_chunks, chunk * chunk_size);
  }
};
