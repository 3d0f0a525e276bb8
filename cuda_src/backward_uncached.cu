// backward_uncached -- dx; a block owns a row that fits nowhere
// owns:  only two sums: each pass reads x and dy again. backward_parameters.cu computes dweight and
//        dbias
// moves: x and dy twice in, dx once out
// takes: any row
// needs: num_cols and all row strides multiples of pack_size, addresses aligned to a pack
#include "backward.cuh"
#include "uncached_row.cuh"

template <class LoadX, class LoadDy, class LoadWeight, class StoreDx, Gradients gradients,
          bool centered, Tile tile>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm)
    backward_uncached(const Backward<LoadX, LoadDy, LoadWeight, StoreDx> call) {
  static_assert(!gradients.dweight && !gradients.dbias,
                "backward_parameters computes dweight and dbias");
  using Compute = typename LoadX::Compute;
  constexpr int pack_size = tile.pack_size;
  BlockReduce<tile.threads_per_row, Compute> reduce(dynamic_smem());

  for (long long row = blockIdx.x; row < call.num_rows; row += gridDim.x) {
    auto gradient = call.template gradient_of<centered>(row);
    UncachedRow<LoadX, tile> x{call.load_x, row, call.num_cols};

    Sum<Compute, 2> sums{};
    x.for_each_pack([&](long long col, const Compute(&xs)[pack_size]) {
      Compute dys[pack_size], weights[pack_size], biases[pack_size];
      unpack(call.load_dy.template load<pack_size>(row, col), dys);
      call.load_weight.load(col, weights);
      if constexpr (StoreDx::recomputes) {
        call.store.load_bias().load(col, biases);
        call.template recompute<centered>(gradient, row, col, xs, weights, biases);
      }
      gradient.template add_to<centered>(sums, xs, dys, weights);
    });
    if constexpr (!gradients.dx) continue;
    gradient.finish(reduce.all(sums), Compute(1) / static_cast<Compute>(call.num_cols));
    x.for_each_pack([&](long long col, const Compute(&xs)[pack_size]) {
      Compute dys[pack_size], weights[pack_size], dx[pack_size];
      unpack(reload<pack_size>(call.load_dy, row, col), dys);
      call.load_weight.load(col, weights);
      gradient.template dx_of_pack<centered>(dx, xs, dys, weights);
      call.store_dx(row, col, dx);
    });
  }
}
