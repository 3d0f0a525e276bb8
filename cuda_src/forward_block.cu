// forward_block -- y = (x - mean) * rstd * weight + bias; a block owns a row
// owns:  packs_per_thread packs of the row in each thread's registers, and to 8 bits of the next row if there is room; with
//        stages, `stages` rows on their way through shared memory; if packs_per_thread is 0, one row in shared memory
// moves: x once in, y once out: num_cols * (itemsize of x + itemsize of y) bytes a row
// takes: num_cols <= pack_size * threads_per_row * packs_per_thread; without registers, a row that fits the shared memory of a
//        block beside BlockReduce::smem_bytes; wider rows: forward_cluster.cu
// needs: num_cols and all row strides multiples of pack_size, addresses aligned to a pack
#include "forward_ring.cuh"

template <class Load, class Store, bool centered, Statistics statistics, Tile tile>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm) forward_block(const Forward<Load, Store> problem) {
  using Compute = typename Load::Compute;
  problem.template start<tile>();
  if constexpr (tile.stages > 0) {
    forward_ring<Load, Store, centered, statistics, tile>(problem, dynamic_smem());
  } else {
    using Reduce = BlockReduce<tile.threads_per_row, Compute>;
    Reduce reduce(dynamic_smem());
    const Slice cols{0, static_cast<int>(problem.num_cols)};
    auto values = row_on_chip<Load, tile>(dynamic_smem() + Reduce::smem_bytes);
    constexpr bool fetches_ahead = Forward<Load, Store>::template fetches_ahead<decltype(values), tile>;
    if (fetches_ahead) values.fetch(problem.load, blockIdx.x, cols);
    for (long long row = blockIdx.x; row < problem.num_rows; row += gridDim.x) {
      if (!fetches_ahead) values.fetch(problem.load, row, cols);
      const auto found = row_statistics<centered, statistics, Compute>(values, reduce, problem.num_cols, problem.eps);
      if constexpr (fetches_ahead) {
        const NextRow<Load, tile> next(problem.load, values, row + gridDim.x, problem.num_rows);
        problem.template write<centered>(row, values, found, reduce, threadIdx.x == 0, true, next);
      } else {
        problem.template write<centered>(row, values, found, reduce, threadIdx.x == 0);
      }
    }
  }
}
