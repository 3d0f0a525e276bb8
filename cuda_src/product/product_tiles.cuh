// product_tiles.cuh -- norm_linear.cu: sizes, shared memory, the order of tiles, and their loads
//
// Clusters take tiles in turns. What runs at a time should read few rows of x and of weight, so
// that the L2 cache reads them once. One thread loads all that its block multiplies: each step is a
// tile of x and the tiles of weight, which land in a stage of the ring. A tile's last step has the
// terms of its columns. The two blocks of a cluster multiply the same weight: each loads half of
// it, for both.
#pragma once
#include "tensor_tile.cuh"
#include "threads.cuh"

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

// block_cols columns of y, and block_rows rows for each block of a cluster.
struct ProductTile {
  unsigned strip;  // along the rows
  unsigned place;  // along the columns
};

struct ProductTiles {
  unsigned strips;  // tiles along the rows
  unsigned across;  // tiles along the columns
  unsigned strips_at_a_time;
  // Turns of whole tiles. Where the last tiles would leave half of the clusters without work, two
  // clusters compute one tile: each leaves one of its warpgroups idle, and takes half the time.
  unsigned whole;

  __device__ __forceinline__ ProductTiles(long long num_rows, long long num_cols, int rows_of_tile,
                                          unsigned strips_at_a_time, unsigned num_clusters)
      : strips((num_rows + rows_of_tile - 1) / rows_of_tile),
        across((num_cols + block_cols - 1) / block_cols),
        strips_at_a_time(strips_at_a_time),
        whole(strips * across) {
    const unsigned last = whole % num_clusters;
    if (last * 2 <= num_clusters) whole -= last;
  }

  __device__ __forceinline__ unsigned num_turns() const { return strips * across * 2 - whole; }
  __device__ __forceinline__ bool computes(unsigned group, unsigned turn) const {
    return turn < whole || (turn - whole) % 2 == group;
  }
  __device__ __forceinline__ ProductTile find(unsigned turn) const {
    ProductTile tile;
    if (turn >= whole) turn = whole + (turn - whole) / 2;
    const unsigned first = turn / (strips_at_a_time * across) * strips_at_a_time;
    const unsigned left = strips - first;
    const unsigned height = left < strips_at_a_time ? left : strips_at_a_time;
    const unsigned rest = turn - first * across;
    tile.strip = first + rest % height;
    tile.place = rest / height;
    return tile;
  }
};

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
