// backward_cluster -- dx, and partial sums of dweight and dbias; a thread-block cluster owns a row
// owns:  each of cluster_size blocks keeps a slice of x, dy and the sums of dweight and dbias, by
//        path: registers: packs_per_thread packs of each in each thread; smem: all in shared
//        memory; ring: sums in registers, `stages` rows in shared memory (backward_ring.cuh)
// moves: x and dy once in, dx once out; 2 * num_cols * 4 bytes of partial sums a cluster
// takes: slices of pack_size * threads_per_row * packs_per_thread columns, or that fit beside
//        ClusterReduce::smem_bytes; wider: backward_uncached.cu
// needs: sm_90 or later; the grid a multiple of cluster_size; num_cols and all row strides
//        multiples of pack_size, addresses aligned to a pack
#include "backward_smem.cuh"
#include "cluster_reduce.cuh"
#include "register_gradient.cuh"

template <class LoadX, class LoadDy, class LoadWeight, class StoreDx, Gradients gradients,
          bool centered, Tile tile>
__global__ void __cluster_dims__(tile.cluster_size, 1, 1)
    __launch_bounds__(tile.block_size(), tile.blocks_per_sm)
        backward_cluster(const Backward<LoadX, LoadDy, LoadWeight, StoreDx> call) {
  let_next_kernel_start();
  if constexpr (tile.path == Path::ring) {
    backward_ring<gradients, centered, tile>(call);
  } else if constexpr (tile.path == Path::registers) {
    using Compute = typename LoadX::Compute;
    const long long cluster = blockIdx.x / tile.cluster_size;
    const long long step = gridDim.x / tile.cluster_size;
    const Slice cols = slice<tile>(static_cast<int>(call.num_cols), cluster_rank());
    ClusterReduce<tile.threads_per_row, tile.cluster_size, Compute> reduce(dynamic_smem());
    RegisterGradient<LoadX, LoadDy, LoadWeight, StoreDx, gradients, centered, tile> gradient(
        call, cols, cluster);

    cluster_sync();  // a block may write to its peers once they run
    for (long long row = cluster; row < call.num_rows; row += step)
      gradient.add_row(row, row + step, reduce);
    gradient.write_partials(cluster, nullptr);
  } else {
    backward_smem<gradients, centered, tile>(call);
  }
}
