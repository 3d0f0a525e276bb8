// product_loads.cuh -- norm_linear.cu: one thread loads all that the block multiplies
//
// Each step is a tile of x and the tiles of weight, which land in a stage of the ring. A tile's
// last step has the terms of its columns, and no x. The two blocks of a cluster multiply the same
// weight: each loads half of it, for both.
#pragma once
#include "cluster.cuh"
#include "product_tiles.cuh"

// Loads block_cols rows of weight, or of the terms, beginning at (row, col).
template <int cluster_size>
__device__ __forceinline__ void load_weight(ProductMemory& memory, unsigned stage,
                                            const TensorMap& map, int col, int row) {
#pragma unroll
  for (int part = 0; part < num_tiles_of_weight; ++part) {
    unsigned char* to = memory.weight(stage) + part * tile_bytes;
    if constexpr (cluster_size == 1)
      tile_load(to, map, col, row + part * 128, &memory.loaded[stage]);
    else if (part == cluster_rank())
      tile_load_to_both(to, map, col, row + part * 128, &memory.loaded[stage]);
  }
}

template <int cluster_size, class Problem>
__device__ __forceinline__ void load_steps(const Problem& problem, ProductMemory& memory,
                                           const ProductTiles& tiles) {
  tile_fetch_map(problem.x);
  tile_fetch_map(problem.weight);
  tile_fetch_map(problem.terms);
  tile_fetch_map(problem.y);
  const unsigned rank = cluster_size > 1 ? cluster_rank() : 0;
  const unsigned num_steps = (problem.in_features + step_cols - 1) / step_cols;
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
      if (at < num_steps) {
        bulk_expect(&memory.loaded[stage], stage_bytes);
        tile_load(memory.x(stage), problem.x, at * step_cols, row, &memory.loaded[stage]);
        load_weight<cluster_size>(memory, stage, problem.weight, at * step_cols, col);
      } else {
        bulk_expect(&memory.loaded[stage], weight_bytes);
        load_weight<cluster_size>(memory, stage, problem.terms, 0, col);
      }
    }
  }
}
