// forward_warp -- y = (x - mean) * rstd * weight + bias; 1 to 32 lanes of a warp own a row
// owns:  each lane keeps packs_per_thread packs of its row in registers; a block works on
//        rows_per_block rows at a time. Path bundle: see forward_bundle.cuh
// moves: x once in, y once out: num_cols * (itemsize of x + itemsize of y) bytes a row
// takes: num_cols <= pack_size * threads_per_row * packs_per_thread; wider rows: forward_block.cu
// needs: num_cols and all row strides multiples of pack_size, addresses aligned to a pack;
//        threads_per_row a power of two, whole warps in a block
#include "forward.cuh"
#include "register_row.cuh"

// Load reads x, Store writes y (load.cuh, store.cuh). centered: LayerNorm, else RMSNorm.
template <class Load, class Store, bool centered, Statistics statistics, Tile tile>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm)
    forward_warp(const Forward<Load, Store> call) {
  using Compute = typename Load::Compute;
  if constexpr (tile.path == Path::bundle) {
    return forward_bundle<centered, statistics, tile>(call);
  }

  auto carried = call.template start<tile>();  // nothing, unless y has 8 bits
  WarpReduce<tile.threads_per_row> reduce;     // sums over the lanes that share a row, by shuffles
  const Slice cols{0, static_cast<int>(call.num_cols)};
  const long long step = static_cast<long long>(gridDim.x) * tile.rows_per_block;

  for (long long first = static_cast<long long>(blockIdx.x) * tile.rows_per_block;
       first < call.num_rows; first += step) {
    const long long row = first + threadIdx.x / tile.threads_per_row;
    // A shuffle needs all lanes of its warp. Lanes beyond the last row load that row again and
    // write nothing.
    const bool present = row < call.num_rows;
    // Starts the loads of the row; if tile.early, also those of weight and bias.
    RegisterRow<Load, tile> values;
    values.fetch(call.load, present ? row : call.num_rows - 1, cols, present);
    const auto parameters = row_parameters<tile>(values, call.store);
    // From here on x is in registers. Every lane gets mean and rstd of its row.
    const auto mean_rstd =
        row_statistics<centered, statistics, Compute>(values, reduce, call.num_cols, call.eps);
    // Applies weight and bias, writes y. The first lane of the row also writes mean and rstd.
    const bool is_first_lane = threadIdx.x % tile.threads_per_row == 0;
    call.template write<centered>({row, is_first_lane, present}, values, mean_rstd, reduce, carried,
                                  parameters);
  }
  call.finish(carried);
}
