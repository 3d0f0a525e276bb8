// grid_sums.cuh -- a block's sums of dweight and dbias, of the same columns of all rows
#pragma once
#include "backward.cuh"
#include "backward_smem.cuh"
#include "grid_shape.cuh"

// A thread has the sums of its own columns: of its first packs in registers, of the others in
// shared memory. There the k-th chunks of 16 bytes of all threads are adjacent, which avoids bank
// conflicts.
template <Gradients gradients, Tile tile>
struct GridSums {
  using Shape = GridShape<tile>;
  static constexpr int pack_size = tile.pack_size;
  static constexpr int chunk_size = pack_size < 4 ? pack_size : 4;
  static constexpr int wanted = gradients.dweight + gradients.dbias;
  // A turn of many steps is unrolled to long code, which takes more registers.
  static constexpr int spare = Shape::spare_registers - (Shape::num_steps < 8 ? 0 : 24);
  static constexpr int fitting = wanted > 0 && spare > 0 ? spare / (pack_size * wanted) : 0;
  static constexpr int num_kept = fitting < Shape::num_packs ? fitting : Shape::num_packs;
  static constexpr int smem_bytes =
      (Shape::num_packs - num_kept) * wanted * pack_size * Shape::num_workers * 4;
  // What is left for weights. Tests for packs beyond the slice take registers too.
  static constexpr int left_registers =
      spare - num_kept * pack_size * wanted - (tile.exact ? 8 : 24);

  float* smem;
  float dweight[num_kept + (num_kept == 0)][pack_size] = {};
  float dbias[num_kept + (num_kept == 0)][pack_size] = {};

  __device__ __forceinline__ explicit GridSums(unsigned char* smem)
      : smem(reinterpret_cast<float*>(smem) + threadIdx.x * chunk_size) {
    if (!Shape::works()) return;
    const float zeros[pack_size] = {};
    for (int pack = num_kept; pack < Shape::num_packs; ++pack) {
      if constexpr (gradients.dweight) set(pack, 0, zeros);
      if constexpr (gradients.dbias) set(pack, wanted - 1, zeros);
    }
  }

  // The number of the pack is a constant of an unrolled loop.
  __device__ __forceinline__ void add(int pack, const float (&x_hats)[pack_size],
                                      const float (&dys)[pack_size]) {
    if (pack < num_kept) {
#pragma unroll
      for (int at = 0; at < pack_size; ++at) {
        if constexpr (gradients.dweight) dweight[pack][at] += dys[at] * x_hats[at];
        if constexpr (gradients.dbias) dbias[pack][at] += dys[at];
      }
      return;
    }
    float products[pack_size];
#pragma unroll
    for (int at = 0; at < pack_size; ++at) products[at] = dys[at] * x_hats[at];
    if constexpr (gradients.dweight) set<true>(pack, 0, products);
    if constexpr (gradients.dbias) set<true>(pack, wanted - 1, dys);
  }
  // Writes the partial row of this group. call: a Backward.
  template <class Call>
  __device__ __forceinline__ void write(const Call& call, Slice cols) const {
    if (!Shape::works()) return;
    const long long first = Shape::group() * call.num_cols + cols.first_col;
#pragma unroll
    for (int pack = 0; pack < Shape::num_packs; ++pack) {
      if (!Shape::in_slice(pack, cols)) continue;
      const long long col = first + Shape::col(pack);
      if constexpr (gradients.dweight) write(pack, 0, dweight, call.dweight_partials + col);
      if constexpr (gradients.dbias) write(pack, wanted - 1, dbias, call.dbias_partials + col);
    }
  }

 private:
  __device__ __forceinline__ float* chunk(int pack, int which, int first) const {
    return smem + (((pack - num_kept) * wanted + which) * pack_size + first) * Shape::num_workers;
  }
  template <bool adds = false>
  __device__ __forceinline__ void set(int pack, int which, const float (&values)[pack_size]) const {
#pragma unroll
    for (int first = 0; first < pack_size; first += chunk_size) {
      float of_chunk[chunk_size];
#pragma unroll
      for (int at = 0; at < chunk_size; ++at) of_chunk[at] = values[first + at];
      float* const to = chunk(pack, which, first);
      if constexpr (adds) {
        add_pack(to, of_chunk);
      } else {
        store_pack<chunk_size>(to, repack<float>(of_chunk));
      }
    }
  }
  template <class Sums>
  __device__ __forceinline__ void write(int pack, int which, const Sums& kept, float* to) const {
    if (pack < num_kept) {
      store_pack<pack_size>(to, repack<float>(kept[pack]));
      return;
    }
#pragma unroll
    for (int first = 0; first < pack_size; first += chunk_size)
      store_pack<chunk_size>(to + first, load_pack<chunk_size>(chunk(pack, which, first)));
  }
};
