// backward_block -- dx, and partial sums of dweight and dbias; a block owns a row
// owns:  in each thread float sums for its columns over all rows that it works on, and by path:
//        registers: packs_per_thread packs of x and dy; ring: `stages` rows in shared memory
//        (backward_ring.cuh)
// moves: x and dy once in, dx once out; 2 * num_cols * 4 bytes of partial sums a block
// takes: num_cols <= pack_size * threads_per_row * packs_per_thread; wider: backward_cluster.cu
// needs: num_cols and all row strides multiples of pack_size, addresses aligned to a pack
#include "register_gradient.cuh"

template <class LoadX, class LoadDy, class LoadWeight, class StoreDx, Gradients gradients,
          bool centered, Tile tile>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm)
    backward_block(const Backward<LoadX, LoadDy, LoadWeight, StoreDx> call) {
  let_next_kernel_start();
  if constexpr (tile.path == Path::ring) {
    backward_ring<gradients, centered, tile>(call);
  } else {
    const Slice cols{0, static_cast<int>(call.num_cols)};
    BlockReduce<tile.threads_per_row, typename LoadX::Compute> reduce(dynamic_smem());
    RegisterGradient<LoadX, LoadDy, LoadWeight, StoreDx, gradients, centered, tile> gradient(
        call, cols, blockIdx.x);

    for (long long row = blockIdx.x; row < call.num_rows; row += gridDim.x)
      gradient.add_row(row, row + gridDim.x, reduce);
    gradient.write_partials(blockIdx.x, nullptr);
  }
}
