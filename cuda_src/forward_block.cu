// forward_block -- y = (x - mean) * rstd * weight + bias; a block owns a row
// owns:  packs_per_thread packs of the row in each thread's registers, and to 8 bits of the next row if there is room; with one
//        stage, the next row in shared memory, with more, `stages` rows on their way through it; if packs_per_thread is 0, one
//        row in shared memory
// moves: x once in, y once out: num_cols * (itemsize of x + itemsize of y) bytes a row
// takes: num_cols <= pack_size * threads_per_row * packs_per_thread; without registers, a row that fits the shared memory of a
//        block beside BlockReduce::smem_bytes; wider rows: forward_cluster.cu
// needs: num_cols and all row strides multiples of pack_size, addresses aligned to a pack
#include "forward_ring.cuh"

template <class Load, class Store, bool centered, Statistics statistics, Tile tile>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm) forward_block(const Forward<Load, Store> problem) {
  using Compute = typename Load::Compute;
  auto carried = problem.template start<tile>();
  if constexpr (tile.stages > 1) {
    forward_ring<Load, Store, centered, statistics, tile>(problem, dynamic_smem(), carried);
  } else {
    using Reduce = BlockReduce<tile.threads_per_row, Compute>;
    Reduce reduce(dynamic_smem());
    const Slice cols{0, static_cast<int>(problem.num_cols)};
    auto values = row_on_chip<Load, tile>(dynamic_smem() + Reduce::smem_bytes);
    const auto statistics_of_row = [&] {
      return row_statistics<centered, statistics, Compute>(values, reduce, problem.num_cols, problem.eps);
    };
    if constexpr (tile.stages == 1 || Forward<Load, Store>::template fetches_ahead<decltype(values), tile>) {
      const Turns<tile> turns(problem.num_rows, problem.num_first, problem.rows_of_first);
      long long row = turns.first_row;
      if constexpr (tile.stages == 1) {
        StagedRow<Load, tile> staged(dynamic_smem() + Reduce::smem_bytes);
        if (threadIdx.x == 0) staged.fetch(problem.load, row, cols.size());
        __syncthreads();
        for (unsigned left = turns.count; left > 0; --left) {
          staged.take(values, cols);
          const auto found = statistics_of_row();
          // All have taken the row, to find them. Sooner would be slower (H200, bf16, LayerNorm to 8 bits by the row's scale:
          // 32,768 columns 0.72 before the squares, 0.87 here; 12,288 0.88 and 0.94).
          if (threadIdx.x == 0 && left > 1) staged.fetch(problem.load, row + turns.step, cols.size());
          problem.template write<centered>(row, values, found, reduce, threadIdx.x == 0, carried);
          row += turns.step;
        }
      } else {
        values.fetch(problem.load, row, cols);
        for (unsigned left = turns.count; left > 0; --left) {
          const auto found = statistics_of_row();
          const NextRow<Load, tile> next(problem.load, values, row + turns.step, problem.num_rows);
          problem.template write<centered>(row, values, found, reduce, threadIdx.x == 0, carried, true, next);
          row += turns.step;
        }
      }
    } else {
      for (long long row = blockIdx.x; row < problem.num_rows; row += gridDim.x) {
        values.fetch(problem.load, row, cols);
        problem.template write<centered>(row, values, statistics_of_row(), reduce, threadIdx.x == 0, carried);
      }
    }
  }
  problem.finish(carried);
}
