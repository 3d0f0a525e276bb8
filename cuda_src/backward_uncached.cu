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
    RowGradient<Compute, LoadX::normalized> gradient{};
    if constexpr (centered && !LoadX::normalized) gradient.mean = call.mean[row];
    gradient.rstd = call.rstd[row];
    UncachedRow<LoadX, tile> x{call.load_x, row, call.num_cols};

    Sum<Compute, 2> sums{};
    x.for_each_pack([&](long long col, const Compute(&values)[pack_size]) {
      Compute dys[pack_size], weights[pack_size];
      unpack(call.load_dy.template load<pack_size>(row, col), dys);
      call.load_weight.load(col, weights);
      if constexpr (StoreDx::recomputes)
        recompute<centered>(call, gradient, row, col, values, weights);
#pragma unroll
      for (int at = 0; at < pack_size; ++at) {
        const Compute wdy = rounded_product(dys[at], weights[at]);
        sums.part[0] += wdy * gradient.template x_hat<centered>(values[at]);
        if constexpr (centered) sums.part[1] += wdy;
      }
    });
    if constexpr (!gradients.dx) continue;
    gradient.finish(reduce.all(sums), Compute(1) / static_cast<Compute>(call.num_cols));
    x.for_each_pack([&](long long col, const Compute(&values)[pack_size]) {
      Compute dys[pack_size], weights[pack_size], dx[pack_size];
      unpack(call.load_dy.template reload<pack_size>(row, col), dys);
      call.load_weight.load(col, weights);
#pragma unroll
      for (int at = 0; at < pack_size; ++at) {
        dx[at] = gradient.template dx<centered>(gradient.template x_hat<centered>(values[at]),
                                                rounded_product(dys[at], weights[at]));
      }
      call.store.store(row, col, dx);
    });
  }
}
