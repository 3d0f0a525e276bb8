// product_loads.cuh -- norm_linear.cu: one thread loads all that the block multiplies
//
// Each step is a tile of x and the tiles of weight, which land in a stage of the ring. The two
// blocks of a cluster multiply the same weight: each loads half of it, for both.
#pragma once
#include "cluster.cuh"
#include "product_tiles.cuh"

// The terms of a tile's columns, which replace those of the tile before.
template <class Problem>
__device__ __forceinline__ void load_terms(const Problem& problem, ProductMemory& memory,
                                           unsigned tile, long long col) {
  if (tile > 0) bulk_wait(&memory.terms_used, tile - 1);
  const long long left = problem.out_features - col;
  const unsigned bytes = (left < block_cols ? left : block_cols) * sizeof(ColumnTerms);
  bulk_expect(&memory.terms_loaded, bytes);
  bulk_copy(memory.terms, problem.terms + col, bytes, &memory.terms_loaded);
}

template <int cluster_size, class Problem>
__device__ __forceinline__ void load_steps(const Problem& problem, ProductMemory& memory,
                                           const ProductTiles& tiles) {
  tile_fetch_map(problem.x);
  tile_fetch_map(problem.weight);
  tile_fetch_map(problem.y);
  const unsigned rank = cluster_size > 1 ? cluster_rank() : 0;
  const unsigned num_steps = (problem.in_features + step_cols - 1) / step_cols;
  // When the ring has gone round once, the warps have written the tile before.
  const unsigned step_of_terms = num_steps <= num_stages ? num_steps - 1 : num_stages;
  unsigned step = 0, at_tile = 0;
  for (unsigned turn = blockIdx.x / cluster_size; turn < tiles.num_turns();
       turn += gridDim.x / cluster_size, ++at_tile) {
    const ProductTile tile = tiles.find(turn);
    const int row = (tile.strip * cluster_size + rank) * block_rows;
    const int col = tile.place * block_cols;
#pragma unroll 1
    for (unsigned at = 0; at < num_steps; ++at, ++step) {
      const unsigned stage = step % num_stages;
      if (step >= num_stages) bulk_wait(&memory.multiplied[stage], step / num_stages - 1);
      unsigned long long* loaded = &memory.loaded[stage];
      bulk_expect(loaded, stage_bytes);
      tile_load(memory.x(stage), problem.x, at * step_cols, row, loaded);
#pragma unroll
      for (int part = 0; part < num_tiles_of_weight; ++part) {
        unsigned char* to = memory.weight(stage) + part * tile_bytes;
        if constexpr (cluster_size == 1)
          tile_load(to, problem.weight, at * step_cols, col + part * 128, loaded);
        else if (part == rank)
          tile_load_to_both(to, problem.weight, at * step_cols, col + part * 128, loaded);
      }
      if (at == step_of_terms) load_terms(problem, memory, at_tile, col);
    }
  }
}
