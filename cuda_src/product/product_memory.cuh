// product_memory.cuh -- the sizes of norm_linear.cu, and what its shared memory holds
#pragma once
#include "tensor_tile.cuh"

// A block computes block_rows x block_cols of y at a time, in steps of step_cols columns of x.
// Two warpgroups multiply, 64 rows each; a third loads.
constexpr int block_rows = 128, block_cols = 256, step_cols = 64;
constexpr int group_rows = 64, threads_per_group = 128, num_multiplying_warps = 8;
constexpr int product_threads = 3 * threads_per_group;
constexpr int num_stages = 4;                    // steps that are loaded or multiplied
constexpr int tile_bytes = 128 * step_cols * 2;  // what one load brings: 128 rows of x or of weight
constexpr int group_bytes = group_rows * step_cols * 2;  // of x
constexpr int num_tiles_of_weight = block_cols / 128;
constexpr unsigned weight_bytes = num_tiles_of_weight * tile_bytes;
constexpr unsigned stage_bytes = tile_bytes + weight_bytes;
// The last step of a tile has the terms of its columns where x would be (column_terms.cuh).
constexpr int terms_tile_bytes = 128 * 16 * 2;
constexpr unsigned terms_bytes = num_tiles_of_weight * terms_tile_bytes;

struct ProductMemory {
  unsigned char stages[num_stages][stage_bytes];  // x, then weight; swizzled
  unsigned long long loaded[num_stages], multiplied[num_stages];

  __device__ __forceinline__ unsigned char* x(unsigned stage) { return stages[stage]; }
  __device__ __forceinline__ unsigned char* weight(unsigned stage) {
    return stages[stage] + tile_bytes;
  }
  template <int cluster_size>
  __device__ __forceinline__ void begin() {
    for (int at = 0; at < num_stages; ++at) {
      bulk_barrier_init(&loaded[at]);
      bulk_barrier_init(&multiplied[at], cluster_size * num_multiplying_warps);
    }
  }
};
