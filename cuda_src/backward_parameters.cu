// backward_parameters -- dweight, dbias, dx_sum: sums over rows, a few columns a block, in order
// owns:  threads_per_row neighbouring packs of columns; see parameter_sums.cuh. Half of the blocks
//        sum dx, where that is wanted
// moves: PartialSums: the partial rows of another kernel once in; RowProducts: x and dy once in
// takes: any number of rows and columns
// needs: num_cols and all row strides multiples of pack_size, addresses aligned to a pack; shared
//        memory for 2 * pack_size * threads_per_row sums a warp
#include "parameter_sums.cuh"

template <class Rows, class Dweight, class Dbias, Tile tile, class DxSum = void>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm)
    backward_parameters(const AllParameters<Rows, Dweight, Dbias, DxSum> call) {
  await_previous_kernel();
  if constexpr (is_same<DxSum, void>) {
    sum_parameters<tile>(call, blockIdx.x, gridDim.x, dynamic_smem());
  } else {
    const unsigned half = gridDim.x / 2;
    if (blockIdx.x < half) {
      sum_parameters<tile>(call, blockIdx.x, half, dynamic_smem());
    } else {
      sum_parameters<tile>(call.of_dx, blockIdx.x - half, half, dynamic_smem());
    }
  }
}
