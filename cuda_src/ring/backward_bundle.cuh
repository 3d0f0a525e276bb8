// backward_bundle.cuh -- path `bundle` of backward_warp.cu: several rows at once in shared memory
//
// needs: rows without gaps, x and dx of one size, and shared memory for the images (bundle.cuh).
#pragma once
#include "bundle.cuh"
#include "register_gradient.cuh"

// added: the tensor that is added to dx, if there is one.
template <Gradients gradients, bool centered, Tile tile, class LoadX, class LoadDy,
          class LoadWeight, class StoreDx, class... Added>
__device__ __forceinline__ void backward_bundles(
    const Backward<LoadX, LoadDy, LoadWeight, StoreDx>& call, unsigned char* smem,
    const BundleStream<tile, Added>&... added) {
  using Compute = typename LoadX::Compute;
  using X = typename LoadX::Held;
  using Dy = typename LoadDy::Held;
  using Parts = BundleParts<tile>;
  const int num_cols = static_cast<int>(call.num_cols);
  const BundleStream<tile, X> x{call.load_x.x, num_cols};
  const BundleStream<tile, Dy> dy{call.load_dy.x, num_cols};
  const BundleStream<tile, Compute> mean{call.mean, 1}, rstd{call.rstd, 1};
  const Bundles<tile, X, Dy, Compute, Compute, Added...> bundles(smem, call.num_rows, x, dy, mean,
                                                                 rstd, added...);
  auto in_smem = call;  // the same for the rows of one bundle
  in_smem.load_x.x_stride = in_smem.load_dy.x_stride = in_smem.store.written_stride() = num_cols;
  RegisterGradient<LoadX, LoadDy, LoadWeight, StoreDx, gradients, centered, tile> gradient(
      in_smem, {0, num_cols}, 0);
  WarpReduce<tile.threads_per_row> reduce;
  const auto work_on = [&](const unsigned char* slot, int part, long long first_row, int num_rows,
                           int num_turns) {
    in_smem.load_x.x = x.in(slot, part, first_row);
    in_smem.load_dy.x = dy.in(slot += x.slot_bytes(), part, first_row);
    in_smem.mean = mean.in(slot += dy.slot_bytes(), part, first_row);
    in_smem.rstd = rstd.in(slot += mean.slot_bytes(), part, first_row);
    ((in_smem.store.dsum = added.in(slot + rstd.slot_bytes(), part, first_row),
      in_smem.store.dsum_stride = num_cols),
     ...);
    in_smem.num_rows = num_rows;
    auto stored = call.store;
    auto* const dx = stored.written() + first_row * num_cols;
    auto* const results =
        result_image(reinterpret_cast<decltype(dx)>(const_cast<X*>(in_smem.load_x.x)), dx);
    in_smem.store.written() = results;
#pragma unroll 1
    for (int turn = 0; turn < num_turns; ++turn) {
      const int row = turn * Parts::rows_at_once + Parts::first_row();
      gradient.add_row(row, row, reduce);
    }
    __syncwarp();
    write_image<Parts::lanes>(dx, results, num_rows * num_cols);
  };
  bundles.for_each(work_on, x, dy, mean, rstd, added...);
  __syncthreads();  // the sums overwrite the images
  gradient.write_partials(blockIdx.x, reinterpret_cast<Compute*>(smem));
}

template <Gradients gradients, bool centered, Tile tile, class LoadX, class LoadDy,
          class LoadWeight, class StoreDx>
__device__ __forceinline__ void backward_bundle(
    const Backward<LoadX, LoadDy, LoadWeight, StoreDx>& call) {
  if constexpr (StoreDx::adds && gradients.dx) {
    const BundleStream<tile, typename StoreDx::Added> added{call.store.added_start(0),
                                                            static_cast<int>(call.num_cols)};
    backward_bundles<gradients, centered, tile>(call, dynamic_smem(), added);
  } else {
    backward_bundles<gradients, centered, tile>(call, dynamic_smem());
  }
}
