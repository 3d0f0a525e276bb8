// norm_linear -- y = rstd (x weight^T - mean sums) + bias, a block owns 128 x 256 of y at a time
// owns:  two warpgroups 64 rows each, in registers. Of a third one a warp loads, and three compute
//        the statistics of rows. Blocks stay and take tiles in turns
// moves: each tile reads its rows of x and of weight, from the L2 cache but for the first time; two
//        blocks of a cluster read the weight once. x once more for its statistics. y out, 8 bytes a
//        row for mean and rstd
// takes: bfloat16 and float16, columns of x and of y multiples of 8
// needs: sm_90a. weight: times the norm's weight, each row centered for LayerNorm, then rounded.
//        terms: the sums of these rows, and weight times the norm's bias plus the bias
#include "product_rows.cuh"
#include "product_tiles.cuh"
#include "row_statistics.cuh"
#include "threads.cuh"

template <class T>
struct NormLinear {
  TensorMap x;       // [num_rows, in_features]
  TensorMap weight;  // [out_features, in_features], in the order of fold_weight.cu
  TensorMap terms;   // [out_features, num_term_cols] (column_terms.cuh), in the same order
  const T* x_rows;   // x again
  T* y;              // [num_rows, out_features]
  float* mean;       // null: not wanted; so too rstd
  float* rstd;
  unsigned long long* next_row;  // 0 (row_statistics.cuh)
  unsigned long long* known;     // a word of 0 a row (row_statistics.cuh)
  long long num_rows;
  long long in_features;
  long long out_features;
  long long strips_at_a_time;
  double eps;
};

template <class T, int cluster_size>
__device__ __forceinline__ void compute_tiles(const NormLinear<T>& call, ProductMemory& memory,
                                              const ProductTiles& tiles) {
  const unsigned warp = threadIdx.x / 32 - threads_per_group / 32, group = warp / 4;
  const unsigned rank = cluster_size > 1 ? cluster_rank() : 0;
  const unsigned num_steps = (call.in_features + step_cols - 1) / step_cols;
  Results<T> results{.col = static_cast<int>(call.out_features)};  // none yet
  const auto write = [&](int part) {
    results.write(part, call.y, call.num_rows, call.out_features);
  };
  unsigned step = 0;
  for (unsigned turn = blockIdx.x / cluster_size; turn < tiles.num_turns();
       turn += gridDim.x / cluster_size) {
    if (!tiles.computes(group, turn)) {
      pass_rows<cluster_size>(num_steps, memory, step);
      continue;
    }
    float d[128];
    unsigned at = 0;
#pragma unroll 1
    for (; at < Results<T>::num_parts; ++at) {
      if (at < num_steps) multiply_step<T, cluster_size>(d, memory, at, step++);
      write(at);
    }
    const ProductTile tile = tiles.find(turn);
    results.row = (tile.strip * cluster_size + rank) * block_rows + warp * 16;
    results.col = tile.place * block_cols;
    await_previous_kernel();  // it fills known with 0
    KnownRows known;
    known.read(call.known, results.row, call.num_rows);  // in time, but for the first tiles
#pragma unroll 1
    for (; at < num_steps; ++at, ++step) multiply_step<T, cluster_size>(d, memory, at, step);
    const TwoRows rows = known.wait(call.known, results.row, call.num_rows);
    add_terms<cluster_size>(d, rows, memory, step++);
    results.take(d, rows);
  }
  for (int part = 0; part < Results<T>::num_parts; ++part) write(part);
}

template <class T, bool centered, int cluster_size>
__global__ void __launch_bounds__(product_threads, 1) __cluster_dims__(cluster_size, 1, 1)
    norm_linear(const __grid_constant__ NormLinear<T> call) {
  auto& memory = *reinterpret_cast<ProductMemory*>(tiles_smem());
  if (threadIdx.x == 0) memory.begin<cluster_size>();
  if constexpr (cluster_size > 1)
    cluster_sync();
  else
    __syncthreads();
  const ProductTiles tiles(call.num_rows, call.out_features, block_rows * cluster_size,
                           call.strips_at_a_time, gridDim.x / cluster_size);
  // Registers: 128 threads of 56 and 256 of 224, as many as all have at the start.
  if (threadIdx.x >= threads_per_group) {
    take_registers<224>();
    compute_tiles<T, cluster_size>(call, memory, tiles);
  } else {
    keep_registers<56>();
    if (threadIdx.x >= 32)
      find_statistics<centered>(call);
    else if (threadIdx.x == 0)
      load_steps<cluster_size>(call, memory, tiles);
  }
  // A block that ends could no longer be written to, nor be told of a stage.
  __syncwarp();
  if constexpr (cluster_size > 1) cluster_sync();
}
