// backward_cluster -- dx, and partial sums of dweight and dbias; a thread-block cluster owns a row
// owns:  each of cluster_size blocks keeps a slice of x, of dy and of the sums of dweight and dbias: packs_per_thread packs of
//        each in each thread's registers; with stages, sums in registers and `stages` rows on their way through shared
//        memory; if packs_per_thread is 0, all of it in shared memory
// moves: x and dy once in, dx once out; 2 * num_cols * 4 bytes of partial sums a cluster
// takes: slices of pack_size * threads_per_row * packs_per_thread columns, or that fit a block's shared memory beside
//        ClusterReduce::smem_bytes; wider: backward_uncached.cu
// needs: sm_90 or later; the grid a multiple of cluster_size; num_cols and all row strides multiples of pack_size,
//        addresses aligned to a pack
#include "backward_ring.cuh"
#include "register_gradient.cuh"

template <class LoadX, class LoadDy, class Scale, class StoreDx, Gradients gradients, bool centered, Tile tile>
__global__ void __cluster_dims__(tile.cluster_size, 1, 1) __launch_bounds__(tile.block_size(), tile.blocks_per_sm)
    backward_cluster(const Backward<LoadX, LoadDy, Scale, StoreDx> problem) {
  let_next_kernel_start();
  using Compute = typename LoadX::Compute;
  using X = typename LoadX::Held;
  using Dy = typename LoadDy::Held;
  if constexpr (tile.stages > 0) {
    backward_ring<LoadX, LoadDy, Scale, StoreDx, gradients, centered, tile>(problem, dynamic_smem());
  } else if constexpr (tile.packs_per_thread > 0) {
    RegisterGradient<LoadX, LoadDy, Scale, StoreDx, gradients, centered, tile> gradient(
        problem, slice<tile>(static_cast<int>(problem.num_cols), cluster_rank()));
    ClusterReduce<tile.threads_per_row, tile.cluster_size, Compute> reduce(dynamic_smem());
    const long long cluster = blockIdx.x / tile.cluster_size;
    const long long step = gridDim.x / tile.cluster_size;

    gradient.start(cluster);
    cluster_sync();  // peers run
    for (long long row = cluster; row < problem.num_rows; row += step) gradient.add_row(row, row + step, reduce);
    gradient.write_partials(cluster, nullptr);
  } else {
    constexpr int pack_size = tile.pack_size;
    const int num_cols = static_cast<int>(problem.num_cols);
    const Slice cols = slice<tile>(num_cols, cluster_rank());
    const auto [first_col, last_col] = cols;
    const int slice_cols = largest_share<tile.cluster_size, 8 * tile.pack_size>(num_cols);

    unsigned char* smem = dynamic_smem();
    ClusterReduce<tile.threads_per_row, tile.cluster_size, Compute> reduce(smem);
    smem += decltype(reduce)::smem_bytes;
    // The widest type first: each part then starts aligned to its own packs.
    auto* dweight = reinterpret_cast<Compute*>(smem);
    smem += gradients.dweight ? (slice_cols * sizeof(Compute) + 15) / 16 * 16 : 0;
    auto* dbias = reinterpret_cast<Compute*>(smem);
    smem += gradients.dbias ? (slice_cols * sizeof(Compute) + 15) / 16 * 16 : 0;
    SmemRow<X, Compute, tile> x(smem);
    smem += (slice_cols * sizeof(X) + 15) / 16 * 16;
    SmemRow<Dy, Compute, tile> dy(smem);

    for (int col = first_col + threadIdx.x * pack_size; col < last_col; col += tile.threads_per_row * pack_size) {
      const Compute zeros[pack_size] = {};
      if constexpr (gradients.dweight) store_pack<pack_size>(dweight + (col - first_col), repack<Compute>(zeros));
      if constexpr (gradients.dbias) store_pack<pack_size>(dbias + (col - first_col), repack<Compute>(zeros));
    }
    cluster_sync();  // peers run

    const Compute reciprocal = Compute(1) / static_cast<Compute>(num_cols);
    for (long long row = blockIdx.x / tile.cluster_size; row < problem.num_rows; row += gridDim.x / tile.cluster_size) {
      x.fetch(problem.load_x, row, cols);
      dy.fetch(problem.load_dy, row, cols);
      RowGradient<Compute, LoadX::normalized> gradient{};
      if constexpr (centered && !LoadX::normalized) gradient.mean = problem.mean[row];
      gradient.rstd = problem.rstd[row];

      Sum<Compute, 2> sums{};
      x.for_each_pack([&](int col, const Compute(&values)[pack_size]) {
        Compute dys[pack_size], weights[pack_size], products[pack_size];
        unpack(load_pack<pack_size>(dy.held + (col - first_col)), dys);
        if constexpr (gradients.dx || StoreDx::recomputes) problem.scale.load(col, weights);
        if constexpr (StoreDx::recomputes) recompute<centered>(problem, gradient, row, col, values, weights);
#pragma unroll
        for (int at = 0; at < pack_size; ++at) {
          const Compute x_hat = gradient.template x_hat<centered>(values[at]);
          products[at] = dys[at] * x_hat;
          if constexpr (gradients.dx) {
            const Compute wdy = times(dys[at], weights[at]);
            sums.part[0] += wdy * x_hat;
            if constexpr (centered) sums.part[1] += wdy;
          }
        }
        if constexpr (gradients.dweight) add_pack(dweight + (col - first_col), products);
        if constexpr (gradients.dbias) add_pack(dbias + (col - first_col), dys);
      });
      if constexpr (gradients.dx) {
        gradient.finish(reduce.all(sums), reciprocal);
        x.for_each_pack([&](int col, const Compute(&values)[pack_size]) {
          Compute dys[pack_size], weights[pack_size], dx[pack_size];
          unpack(load_pack<pack_size>(dy.held + (col - first_col)), dys);
          problem.scale.load(col, weights);
#pragma unroll
          for (int at = 0; at < pack_size; ++at) {
            dx[at] = gradient.template dx<centered>(gradient.template x_hat<centered>(values[at]), times(dys[at], weights[at]));
          }
          problem.store.store(row, col, dx);
        });
      }
    }

    const long long offset = static_cast<long long>(blockIdx.x / tile.cluster_size) * problem.num_cols;
    for (int col = first_col + threadIdx.x * pack_size; col < last_col; col += tile.threads_per_row * pack_size) {
      const int at = col - first_col;
      if constexpr (gradients.dweight) {
        store_pack<pack_size>(problem.dweight_partials + offset + col, load_pack<pack_size>(dweight + at));
      }
      if constexpr (gradients.dbias) {
        store_pack<pack_size>(problem.dbias_partials + offset + col, load_pack<pack_size>(dbias + at));
      }
    }
  }
}
