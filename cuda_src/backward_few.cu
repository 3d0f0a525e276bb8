// backward_few -- dx, dweight and dbias of few rows in one launch
// owns:  the first num_row_blocks blocks own rows as the strategy's own kernel does, and write the
//        same bits of dx. The others own columns of dweight and dbias (parameter_sums.cuh).
//        Neither kind waits for the other
// moves: x and dy once in, and once more from the L2 cache; dx once out
// takes: rows of a warp's or block's registers, or of a ring of up to 1024 threads
// needs: num_cols and all row strides multiples of pack_size, addresses aligned to a pack; shared
//        memory for either kind of block
#include "parameter_sums.cuh"
#include "register_gradient.cuh"

template <class LoadX, class LoadDy, class LoadWeight, class StoreDx, class Dweight, class Dbias>
struct BackwardFew {
  Backward<LoadX, LoadDy, LoadWeight, StoreDx> rows;
  Dweight* dweight;  // [num_cols]; void: not wanted
  Dbias* dbias;      // [num_cols]; void: not wanted
  long long num_row_blocks;
};

template <class LoadX, class LoadDy, class LoadWeight, class StoreDx, class Dweight, class Dbias,
          bool centered, Tile tile, Tile sums>
__global__ void __launch_bounds__(sums.block_size(), 1)
    backward_few(const BackwardFew<LoadX, LoadDy, LoadWeight, StoreDx, Dweight, Dbias> call) {
  using Compute = typename LoadX::Compute;
  const auto& rows = call.rows;
  const int num_row_blocks = static_cast<int>(call.num_row_blocks);
  if (blockIdx.x >= num_row_blocks) {
    using Products = RowProducts<LoadX, LoadDy, centered>;
    const Parameters<Products, Dweight, Dbias> parameters{
        {rows.load_x, rows.load_dy, rows.mean, rows.rstd},
        call.dweight,
        call.dbias,
        rows.num_rows,
        rows.num_cols};
    sum_parameters<sums>(parameters, blockIdx.x - num_row_blocks, gridDim.x - num_row_blocks,
                         dynamic_smem());
  } else if constexpr (tile.path == Path::ring) {
    backward_few_ring<centered, tile>(rows);
  } else {
    constexpr Gradients gradients{.dx = true, .dweight = false, .dbias = false};
    const long long row = static_cast<long long>(blockIdx.x) * tile.rows_per_block +
                          threadIdx.x / tile.threads_per_row;
    const Slice cols{0, static_cast<int>(rows.num_cols)};
    RegisterGradient<LoadX, LoadDy, LoadWeight, StoreDx, gradients, centered, tile> gradient(
        rows, cols, row);
    if constexpr (tile.threads_per_row <= 32) {
      WarpReduce<tile.threads_per_row> reduce;
      gradient.add_row(row, row, reduce);
    } else {
      BlockReduce<tile.threads_per_row, Compute> reduce(dynamic_smem());
      gradient.add_row(row, row, reduce);
    }
  }
}
