// buffer_reuse.cu -- y[round, block] = sum of what each warp of the cluster gave in that round,
// through one buffer
//
// The barrier between a round's reads and the next round's writes can be left out, and then only a
// warp, or a block, that lags a whole round behind the others finds the wrong values.
struct BufferReuse {
  float* y;
  long long num_rounds;
};

template <bool with_barrier>
__global__ void buffer_reuse(BufferReuse arguments) {
  const unsigned num_warps = blockDim.x / 32, cluster_size = on_cpu::cluster_size();
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* buffer = reinterpret_cast<float*>(dynamic_smem());  // [cluster_size, num_warps]
  on_cpu::cluster_arrive();
  on_cpu::cluster_wait();
  for (long long round = 0; round < arguments.num_rounds; ++round) {
    float value = float(round * 100 + warp) / 32;
    for (int lane_mask = 16; lane_mask > 0; lane_mask /= 2)
      value += __shfl_xor_sync(0xffffffffu, value, lane_mask);
    if (lane < cluster_size) {
      auto* peer = static_cast<float*>(on_cpu::cluster_map(buffer, lane));
      peer[on_cpu::cluster_rank() * num_warps + warp] = value;
    }
    on_cpu::cluster_arrive();
    on_cpu::cluster_wait();
    float sum = 0;
    for (unsigned at = 0; at < cluster_size * num_warps; ++at) sum += buffer[at];
    if (lane == 0) atomicAdd(&arguments.y[round * gridDim.x + blockIdx.x], sum / num_warps);
    if (with_barrier) {
      on_cpu::cluster_arrive();
      on_cpu::cluster_wait();
    }
  }
}
