// block_sum.cu -- y[block] = sum of x[block, :], with the barrier between writing and reading or
// without it
struct BlockSum {
  const float* x;
  float* y;
};

template <bool with_barrier>
__global__ void block_sum(BlockSum arguments) {
  float value = arguments.x[blockIdx.x * blockDim.x + threadIdx.x];
  for (int lane_mask = 16; lane_mask > 0; lane_mask /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, lane_mask);
  float* sums = reinterpret_cast<float*>(dynamic_smem());
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  if (with_barrier) __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) total += sums[warp];
    arguments.y[blockIdx.x] = total;
  }
}
