// backward_warp -- dx, and partial sums of dweight and dbias; 1 to 32 lanes of a warp own a row
// owns:  each lane keeps packs_per_thread packs of x and dy in registers, and float sums for its
//        columns over all rows that it works on. Path bundle: see backward_bundle.cuh
// moves: x and dy once in, dx once out; 2 * num_cols * 4 bytes of partial sums a block
// takes: num_cols <= pack_size * threads_per_row * packs_per_thread; wider rows: backward_block.cu
// needs: num_cols and all row strides multiples of pack_size, addresses aligned to a pack;
//        threads_per_row a power of two, whole warps in a block; shared memory for two rows of sums
//        a warp
#include "register_gradient.cuh"

template <class LoadX, class LoadDy, class LoadWeight, class StoreDx, Gradients gradients,
          bool centered, Tile tile>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm)
    backward_warp(const Backward<LoadX, LoadDy, LoadWeight, StoreDx> call) {
  let_next_kernel_start();
  if constexpr (tile.path == Path::bundle) {
    return backward_bundle<gradients, centered, tile>(call);
  }

  const long long step = static_cast<long long>(gridDim.x) * tile.rows_per_block;
  long long first = static_cast<long long>(blockIdx.x) * tile.rows_per_block;
  const int group = threadIdx.x / tile.threads_per_row;
  const Slice cols{0, static_cast<int>(call.num_cols)};
  WarpReduce<tile.threads_per_row> reduce;  // sums over the lanes that share a row, by shuffles
  // From the first row to the last a thread keeps its weights, and sums of dweight and dbias.
  RegisterGradient<LoadX, LoadDy, LoadWeight, StoreDx, gradients, centered, tile> gradient(
      call, cols, first + group);

  // Writes dx of the row. Lanes beyond the last row, which a shuffle needs too, add and write
  // nothing. The next row may be on its way meanwhile.
  for (; first < call.num_rows; first += step)
    gradient.add_row(first + group, first + step + group, reduce);
  // The block's sums of all its rows: one row of dweight_partials and of dbias_partials.
  auto* smem = reinterpret_cast<typename LoadX::Compute*>(dynamic_smem());
  gradient.write_partials(blockIdx.x, smem);
}
