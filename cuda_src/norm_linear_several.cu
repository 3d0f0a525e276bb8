// norm_linear_several -- y = norm(x + residual) weight^T + bias of 3 to 16 rows, a cluster owns y
// owns:  each block of a cluster has some columns of all rows. It normalises them as tiles in
//        shared memory and multiplies them by tiles of the weight. The blocks add up their sums
// moves: the weight once, by a ring of tiles that is filled before all else; x, the residual and
//        the norm's parameters once a cluster, from the L2 cache; y and the sum out
// takes: bfloat16 and float16, at most num_normalizing_warps * warp_cols columns a block; fewer
//        rows: norm_linear_few.cu, more: norm_linear.cu
// needs: sm_90a; in_features a multiple of 8, addresses aligned to 16 bytes
#include "several_products.cuh"
#include "several_statistics.cuh"
#include "several_sums.cuh"

template <class T, class NormWeight, class NormBias, bool zero_centered>
struct NormLinearSeveral : NormLinearRows<T, NormWeight, NormBias, zero_centered> {
  TensorMap weight;        // [out_features, in_features], in tiles of tile_outputs x step_cols
  long long tile_outputs;  // a multiple of 8
  long long num_tiles;     // of all clusters
  long long most_steps;    // of a block
  long long num_stages;
};

template <class T, class Call>
__device__ __forceinline__ void multiply_tiles(const Call& call, const SeveralMemory& memory,
                                               const SeveralPart& part) {
  const SharedSums sums(memory, part, call.tile_outputs);
  if (sums.own_outputs == 0) return;
  RingPlace place;
  for (int tile = 0; tile < part.num_tiles; ++tile) {
    float bias[2], d[16] = {};
    sums.template load_bias<T>(bias, call, tile);
    multiply_steps<T>(d, place, memory, part.num_steps);
    sums.send(d, bias, tile);
    sums.template write<T>(call, tile);
  }
}

template <class T, class NormWeight, class NormBias, bool zero_centered, bool centered>
__global__ void __launch_bounds__(several_threads, 1) __cluster_dims__(cluster_size, 1, 1)
    norm_linear_several(
        const __grid_constant__ NormLinearSeveral<T, NormWeight, NormBias, zero_centered> call) {
  const SeveralMemory memory(tiles_smem(), call);
  const SeveralPart part(call);
  TileLoads loads{memory, part};
  SeveralRows<T, decltype(call)> rows(call, memory, part);
  const int warp = threadIdx.x / 32;

  if (warp == loading_warp)
    memory.head.make_barriers(memory.num_stages, (call.tile_outputs + 63) / group_outputs);
  cluster_arrive();
  if (warp == loading_warp)
    loads.begin(call);
  else
    rows.load();
  cluster_wait();  // all barriers are there
  if (warp != loading_warp) {
    send_deviations<centered>(rows);
    find_mean_rstd<centered>(rows);
  }
  __syncthreads();
  if (warp != loading_warp) rows.template normalize<centered>();
  fence_tile_store();
  __syncthreads();
  // No block ends before all others have sent it their last sums.
  if (warp < num_multiplying_groups * 4)
    multiply_tiles<T>(call, memory, part);
  else if (warp == loading_warp)
    loads.finish(call);
}
