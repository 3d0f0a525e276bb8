// product_loads.cuh -- norm_linear.cu: one thread loads all that the block multiplies
//
// Each step is a tile of x and the tiles of weight, which land in a stage of the ring. A tile's
// last step has the terms of its columns. The two blocks of a cluster multiply the same
// weight: each loads half of it, for both.
#pragma once
#include "cluster.cuh"
#include "product_tiles.cuh"

// Loads block_cols rows of weight, or of the terms, beginning at (row, col). bytes: of 128 rows.
template <int cluster_size, int bytes>
__device__ __forceinline__ void load_shared(unsigned char* to, unsigned long long* loaded,
                                            const TensorMap& map, int col, int row) {
#pragma unroll
  for (int part = 0; part < num_tiles_of_weight; ++part) {
    if constexpr (cluster_size == 1)
      tile_load(to + part * bytes, map, col, row + part * 128, loaded);
    else if (part == cluster_rank())
      tile_load_to_both(to + part * bytes, map, col, row + part * 128, loaded);
  }
}

template <int cluster_size, class Call>
__device__ __forceinline__ void load_steps(const Call& call, ProductMemory& memory,
                                           const ProductTiles& tiles) {
  tile_fetch_map(call.x);
  tile_fetch_map(call.weight);
  tile_fetch_map(call.terms);
  const unsigned rank = cluster_size > 1 ? cluster_rank() : 0;
  const unsigned num_steps = (call.in_features + step_cols - 1) / step_cols;
  unsigned step = 0;
  for (unsigned turn = blockIdx.x / cluster_size; turn < tiles.num_turns();
       turn += gridDim.x / cluster_size) {
    const ProductTile tile = tiles.find(turn);
    const int row = (tile.strip * cluster_size + rank) * block_rows;
    const int col = tile.place * block_cols;
#pragma unroll 1
    for (unsigned at = 0; at <= num_steps; ++at, ++step) {
      const unsigned stage = step % num_stages;
      if (step >= num_stages) bulk_wait(&memory.multiplied[stage], step / num_stages - 1);
      unsigned long long* loaded = &memory.loaded[stage];
      if (at < num_steps) {
        const int step_col = at * step_cols;
        bulk_expect(loaded, stage_bytes);
        tile_load(memory.x(stage), call.x, step_col, row, loaded);
        load_shared<cluster_size, tile_bytes>(memory.weight(stage), loaded, call.weight, step_col,
                                              col);
      } else {
        bulk_expect(loaded, terms_bytes);
        load_shared<cluster_size, terms_tile_bytes>(memory.x(stage), loaded, call.terms, 0, col);
      }
    }
  }
}
