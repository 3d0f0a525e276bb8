// forward_block -- y = (x - mean) * rstd * weight + bias; a block owns a row
// owns:  packs_per_thread packs of the row in each thread's registers or, if packs_per_thread is 0, the row in shared memory
// moves: x once in, y once out: num_cols * (itemsize of x + itemsize of y) bytes a row
// takes: registers: num_cols <= pack_size * threads_per_row * packs_per_thread; shared memory: num_cols * itemsize of x
//        + BlockReduce::smem_bytes + 16 <= the device's limit a block; wider rows: forward_cluster.cu
// needs: num_cols and all row strides multiples of pack_size, addresses aligned to a pack
#include "forward.cuh"

template <class Load, class Store, bool centered, Statistics statistics, Tile tile>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm) forward_block(const Forward<Load, Store> problem) {
  using Compute = typename Load::Compute;
  unsigned char* smem = dynamic_smem();
  auto* barrier = reinterpret_cast<unsigned long long*>(smem);
  BlockReduce<tile.threads_per_row, Compute> reduce(smem + 16);
  const int num_cols = static_cast<int>(problem.num_cols);

  if constexpr (tile.packs_per_thread > 0) {
    for (long long row = blockIdx.x; row < problem.num_rows; row += gridDim.x) {
      RegisterRow<Load, tile> values;
      values.fetch(problem.load, row, {0, num_cols});
      const auto found = row_statistics<centered, statistics, Compute>(values, reduce, problem.num_cols, problem.eps);
      if (threadIdx.x == 0) problem.save(row, found);
      problem.template write<centered>(row, values, found);
    }
  } else {
    constexpr int row_offset = (16 + decltype(reduce)::smem_bytes + 15) / 16 * 16;
    SmemRow<typename Load::Held, Compute, tile> values(smem + row_offset, barrier);
    if constexpr (tile.bulk) {
      if (threadIdx.x == 0) bulk_barrier_init(barrier);
      __syncthreads();
    }
    for (long long row = blockIdx.x; row < problem.num_rows; row += gridDim.x) {
      values.fetch(problem.load, row, 0, num_cols);
      values.template wait<Load>();
      const auto found = row_statistics<centered, statistics, Compute>(values, reduce, problem.num_cols, problem.eps);
      if (threadIdx.x == 0) problem.save(row, found);
      problem.template write<centered>(row, values, found);
      if constexpr (tile.bulk) bulk_reuse();
      __syncthreads();
    }
  }
}
