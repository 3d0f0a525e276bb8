// norm_linear -- y = rstd (x weight^T - mean sums) + bias, a block owns 128 x 256 of y at a time
// owns:  two warpgroups 64 rows each, in registers; a third loads. Blocks stay and take tiles in
//        turns. The fragments of x that a warp multiplies also give its rows' statistics
// moves: each tile reads its rows of x and of weight, from the L2 cache but for the first time; two
//        blocks of a cluster read the weight once. y out, 8 bytes a row for mean and rstd
// takes: bfloat16 and float16, columns of x and of y multiples of 8
// needs: sm_90a. weight: times the norm's weight, each row centered for LayerNorm, then rounded.
//        terms: the sums of these rows, and weight times the norm's bias plus the bias
#include "known_rows.cuh"
#include "product_loads.cuh"
#include "product_rows.cuh"
#include "product_store.cuh"

template <class T>
struct NormLinear {
  TensorMap x;       // [num_rows, in_features]
  TensorMap weight;  // [out_features, in_features]
  TensorMap terms;   // [out_features, num_term_cols] (column_terms.cuh)
  TensorMap y;       // [num_rows, out_features]
  float* mean;       // null: not wanted; so too rstd
  float* rstd;
  unsigned long long* found;  // a word of 0 a row; null: each tile finds the statistics of its rows
  long long num_rows;
  long long in_features;
  long long out_features;
  long long strips_at_a_time;
  double eps;
};

template <class T, bool centered, int cluster_size>
__device__ __forceinline__ void compute_tiles(const NormLinear<T>& problem, ProductMemory& memory,
                                              const ProductTiles& tiles) {
  const unsigned warp = threadIdx.x / 32 - threads_per_group / 32;
  const unsigned rank = cluster_size > 1 ? cluster_rank() : 0;
  const auto first_row_of = [&](const ProductTile& tile) {
    return (static_cast<long long>(tile.strip) * cluster_size + rank) * block_rows + warp * 16;
  };
  unsigned turn = blockIdx.x / cluster_size, step = 0;
  ProductTile tile = tiles.find(turn);
  KnownRows known;
  known.read(problem.found, first_row_of(tile), problem.num_rows);
  while (turn < tiles.num_turns()) {
    const long long row = first_row_of(tile);
    const int col = tile.place * block_cols;
    const bool computes = tile.groups >> warp / 4 & 1, finds = !known.all();
    TwoRows rows = known.rows();
    const auto look_ahead = [&] {
      turn += gridDim.x / cluster_size;
      tile = tiles.find(turn);
      known.read(problem.found, first_row_of(tile), problem.num_rows);
    };
    if (computes) {
      FragmentSums<T, centered> sums{};
      float d[128];
      Fragments a[2];
      unsigned of_rows[4];
      begin_rows<cluster_size>(d, a, sums, finds, problem.in_features, memory, step);
      if (finds) rows = sums.finish(problem.in_features, problem.eps);
      begin_terms<cluster_size>(d, of_rows, rows, memory, step);
      look_ahead();  // while the last products run
      finish_rows<cluster_size>(memory, step);
      if (finds)
        save_statistics(rows, problem.mean, problem.rstd, problem.found, row, problem.num_rows);
      store_results<T>(d, rows, memory.patches[warp], problem.y, row, col, problem.out_features);
    } else {
      pass_rows<cluster_size>(problem.in_features, memory, step);
      look_ahead();
    }
  }
  if (threadIdx.x % 32 == 0) tile_stores_wait<0>();
}

template <class T, bool centered, int cluster_size>
__global__ void __launch_bounds__(product_threads, 1) __cluster_dims__(cluster_size, 1, 1)
    norm_linear(const __grid_constant__ NormLinear<T> problem) {
  auto& memory = *reinterpret_cast<ProductMemory*>(tiles_smem());
  if (threadIdx.x == 0) memory.begin<cluster_size>();
  if constexpr (cluster_size > 1)
    cluster_sync();
  else
    __syncthreads();
  const ProductTiles tiles(problem.num_rows, problem.out_features, block_rows * cluster_size,
                           problem.strips_at_a_time, gridDim.x / cluster_size);
  // Registers: 128 threads of 40 and 256 of 232, as many as all have at the start.
  if (threadIdx.x < threads_per_group) {
    keep_registers<40>();
    if (threadIdx.x == 0) load_steps<cluster_size>(problem, memory, tiles);
  } else {
    take_registers<232>();
    compute_tiles<T, centered, cluster_size>(problem, memory, tiles);
  }
  // A block that ends could no longer be written to, nor be told of a stage.
  __syncwarp();
  if constexpr (cluster_size > 1) cluster_sync();
}
