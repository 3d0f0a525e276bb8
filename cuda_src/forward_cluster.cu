// forward_cluster -- y = (x - mean) * rstd * weight + bias; a thread-block cluster owns a row
// owns:  each of cluster_size blocks keeps a slice of the row, by path: registers: packs_per_thread
//        packs in each thread; smem: the slice in shared memory; ring: slices of `stages` rows in
//        shared memory (forward_ring.cuh). Sums cross through the peers' shared memory
// moves: x once in, y once out: num_cols * (itemsize of x + itemsize of y) bytes a row
// takes: slices of pack_size * threads_per_row * packs_per_thread columns, or that fit beside
//        ClusterReduce::smem_bytes; wider rows: forward_uncached.cu
// needs: sm_90 or later; the grid a multiple of cluster_size; num_cols and all row strides
//        multiples of pack_size, addresses aligned to a pack
#include "cluster_reduce.cuh"
#include "forward.cuh"
#include "smem_row.cuh"

template <class Load, class Store, bool centered, Statistics statistics, Tile tile>
__global__ void __cluster_dims__(tile.cluster_size, 1, 1)
    __launch_bounds__(tile.block_size(), tile.blocks_per_sm)
        forward_cluster(const Forward<Load, Store> call) {
  if constexpr (tile.path == Path::ring) {
    return forward_ring<centered, statistics, tile>(call);
  }

  using Compute = typename Load::Compute;
  auto carried = call.template start<tile>();  // nothing, unless y has 8 bits
  using Reduce = ClusterReduce<tile.threads_per_row, tile.cluster_size, Compute>;
  Reduce reduce(dynamic_smem());
  const Slice cols = slice<tile>(static_cast<int>(call.num_cols), cluster_rank());
  const bool saves = threadIdx.x == 0 && cluster_rank() == 0;
  const long long step = gridDim.x / tile.cluster_size;
  bool peers_run = false;  // a block may write to its peers' shared memory once they run
  for (long long row = blockIdx.x / tile.cluster_size; row < call.num_rows; row += step) {
    auto values = row_on_chip<Load, tile>(dynamic_smem() + Reduce::smem_bytes);
    values.fetch(call.load, row, cols);
    if (!peers_run) cluster_sync();  // overlaps with the load of the first row
    peers_run = true;
    const auto mean_rstd =
        row_statistics<centered, statistics, Compute>(values, reduce, call.num_cols, call.eps);
    call.template write<centered>({row, saves}, values, mean_rstd, reduce, carried);
  }
  call.finish(carried);
}
