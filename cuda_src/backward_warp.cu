// backward_warp -- dx, and partial sums of dweight and dbias; a warp, or 2 to 16 lanes of one, owns a row
// owns:  each lane keeps packs_per_thread packs of x and dy, and float sums for its columns over all rows it meets
// moves: x and dy once in, dx once out; 2 * num_cols * 4 bytes of partial sums a block
// takes: num_cols <= pack_size * threads_per_row * packs_per_thread; wider rows: backward_block.cu
// needs: num_cols and all row strides multiples of pack_size, addresses aligned to a pack; whole warps in a block;
//        shared memory for two rows of sums a warp; in bundles: rows without gaps, x and dx of one size, shared memory for
//        images
#include "bundle.cuh"
#include "register_gradient.cuh"

// The same, of rows that come and go in bundles. added: what is added to dx, if anything is.
template <class LoadX, class LoadDy, class Scale, class StoreDx, Gradients gradients, bool centered, Tile tile, class... Added>
__device__ __forceinline__ void backward_bundles(const Backward<LoadX, LoadDy, Scale, StoreDx>& problem, unsigned char* smem,
                                                 const BundleStream<tile, Added>&... added) {
  using Compute = typename LoadX::Compute;
  using X = typename LoadX::Held;
  using Dy = typename LoadDy::Held;
  using Parts = BundleParts<tile>;
  const int num_cols = static_cast<int>(problem.num_cols);
  const BundleStream<tile, X> x{problem.load_x.x, num_cols};
  const BundleStream<tile, Dy> dy{problem.load_dy.x, num_cols};
  const BundleStream<tile, Compute> mean{problem.mean, 1}, rstd{problem.rstd, 1};
  const Bundles<tile, X, Dy, Compute, Compute, Added...> bundles(smem, problem.num_rows, x, dy, mean, rstd, added...);
  auto in_smem = problem;  // the rows of one bundle
  in_smem.load_x.x_stride = in_smem.load_dy.x_stride = in_smem.store.written_stride() = num_cols;
  RegisterGradient<LoadX, LoadDy, Scale, StoreDx, gradients, centered, tile> gradient(in_smem, {0, num_cols});
  WarpReduce<tile.threads_per_row> reduce;
  const auto take = [&](const unsigned char* slot, int part, long long first_row, int num_rows, int turns) {
    in_smem.load_x.x = x.in(slot, part, first_row);
    in_smem.load_dy.x = dy.in(slot += x.slot_bytes(), part, first_row);
    in_smem.mean = mean.in(slot += dy.slot_bytes(), part, first_row);
    in_smem.rstd = rstd.in(slot += mean.slot_bytes(), part, first_row);
    ((in_smem.store.dsum = added.in(slot + rstd.slot_bytes(), part, first_row), in_smem.store.dsum_stride = num_cols), ...);
    in_smem.num_rows = num_rows;
    auto stored = problem.store;
    auto* const dx = stored.written() + first_row * num_cols;
    auto* const results = result_image(reinterpret_cast<decltype(dx)>(const_cast<X*>(in_smem.load_x.x)), dx);
    in_smem.store.written() = results;
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      const int row = turn * Parts::rows_at_once + Parts::first_row();
      gradient.add_row(row, row, reduce);
    }
    __syncwarp();
    write_image<Parts::lanes>(dx, results, num_rows * num_cols);
  };
  bundles.for_each(take, x, dy, mean, rstd, added...);
  __syncthreads();  // sums take the place of images
  gradient.write_partials(blockIdx.x, reinterpret_cast<Compute*>(smem));
}

template <class LoadX, class LoadDy, class Scale, class StoreDx, Gradients gradients, bool centered, Tile tile>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm)
    backward_warp(const Backward<LoadX, LoadDy, Scale, StoreDx> problem) {
  let_next_kernel_start();
  if constexpr (tile.bundle > 0) {
    if constexpr (StoreDx::adds && gradients.dx) {
      const BundleStream<tile, typename StoreDx::Added> added{problem.store.added_start(0), static_cast<int>(problem.num_cols)};
      backward_bundles<LoadX, LoadDy, Scale, StoreDx, gradients, centered, tile>(problem, dynamic_smem(), added);
    } else {
      backward_bundles<LoadX, LoadDy, Scale, StoreDx, gradients, centered, tile>(problem, dynamic_smem());
    }
    return;
  }
  RegisterGradient<LoadX, LoadDy, Scale, StoreDx, gradients, centered, tile> gradient(problem,
                                                                                      {0, static_cast<int>(problem.num_cols)});
  WarpReduce<tile.threads_per_row> reduce;
  const long long step = static_cast<long long>(gridDim.x) * tile.rows_per_block;
  const int group = threadIdx.x / tile.threads_per_row;

  long long first = static_cast<long long>(blockIdx.x) * tile.rows_per_block;
  gradient.start(first + group);
  for (; first < problem.num_rows; first += step) gradient.add_row(first + group, first + step + group, reduce);
  gradient.write_partials(blockIdx.x, reinterpret_cast<typename LoadX::Compute*>(dynamic_smem()));
}
