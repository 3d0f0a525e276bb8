// backward_parameters -- dweight and dbias: sums over rows, a few columns a block, in order
// owns:  threads_per_row neighbouring packs of columns; see parameter_sums.cuh
// moves: PartialSums: the partial rows of another kernel once in; RowProducts: x and dy once in
// takes: any number of rows and columns
// needs: num_cols and all row strides multiples of pack_size, addresses aligned to a pack; shared
//        memory for 2 * pack_size * threads_per_row sums a warp
#include "parameter_sums.cuh"

template <class Rows, class Dweight, class Dbias, Tile tile>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm)
    backward_parameters(const Parameters<Rows, Dweight, Dbias> call) {
  await_previous_kernel();
  sum_parameters<tile>(call, blockIdx.x, gridDim.x, dynamic_smem());
}
