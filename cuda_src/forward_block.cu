// forward_block -- y = (x - mean) * rstd * weight + bias; a block owns a row
// owns:  by path: registers: packs_per_thread packs of the row in each thread, perhaps of the next
//        row too; smem: the row in shared memory; ring: `stages` rows in shared memory
//        (forward_ring.cuh)
// moves: x once in, y once out: num_cols * (itemsize of x + itemsize of y) bytes a row
// takes: num_cols <= pack_size * threads_per_row * packs_per_thread; smem: a row that fits beside
//        BlockReduce::smem_bytes; wider rows: forward_cluster.cu
// needs: num_cols and all row strides multiples of pack_size, addresses aligned to a pack
#include "forward.cuh"
#include "smem_row.cuh"

template <class Load, class Store, bool centered, Statistics statistics, Tile tile>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm)
    forward_block(const Forward<Load, Store> call) {
  if constexpr (tile.path == Path::ring) {
    return forward_ring<centered, statistics, tile>(call);
  }

  using Compute = typename Load::Compute;
  auto carried = call.template start<tile>();  // nothing, unless y has 8 bits
  using Reduce = BlockReduce<tile.threads_per_row, Compute>;
  Reduce reduce(dynamic_smem());
  const Slice cols{0, static_cast<int>(call.num_cols)};
  auto values = row_on_chip<Load, tile>(dynamic_smem() + Reduce::smem_bytes);
  if constexpr (Store::template fetches_ahead<Load, decltype(values), tile>) {
    call.store.template write_rows<centered, statistics, tile>(call, values, cols, reduce, carried);
  } else {
    for (long long row = blockIdx.x; row < call.num_rows; row += gridDim.x) {
      values.fetch(call.load, row, cols);
      const auto parameters = row_parameters<tile>(values, call.store);
      const auto mean_rstd =
          row_statistics<centered, statistics, Compute>(values, reduce, call.num_cols, call.eps);
      call.template write<centered>({row, threadIdx.x == 0}, values, mean_rstd, reduce, carried,
                                    parameters);
    }
  }
  call.finish(carried);
}
