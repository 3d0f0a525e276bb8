// bulk_copy.cu -- y = 2 x, each block through a ring of two buffers of shared memory filled by bulk
// copies
enum class Fault { none, no_wait, wrong_parity, early_reuse, misaligned, outside };

struct BulkCopy {
  const float* x;
  float* y;
  long long num_tiles;  // of blockDim.x values each
};

template <Fault fault>
__global__ void bulk_copy(BulkCopy arguments) {
  const unsigned thread = threadIdx.x, num_bytes = blockDim.x * 4;
  float* buffers = reinterpret_cast<float*>(dynamic_smem());
  auto* barriers = reinterpret_cast<unsigned long long*>(buffers + 2 * blockDim.x);
  const float* x = arguments.x + blockIdx.x * arguments.num_tiles * blockDim.x;
  float* y = arguments.y + blockIdx.x * arguments.num_tiles * blockDim.x;

  auto load = [&](long long tile) {
    on_cpu::mbarrier_expect(&barriers[tile % 2], num_bytes);
    const float* from = x + tile * blockDim.x + (fault == Fault::misaligned);
    on_cpu::bulk_load(buffers + (tile % 2 + 2 * (fault == Fault::outside)) * blockDim.x, from,
                      num_bytes, &barriers[tile % 2]);
  };
  if (thread == 0) {
    on_cpu::mbarrier_init(&barriers[0], 1);
    on_cpu::mbarrier_init(&barriers[1], 1);
    load(0);
  }
  __syncthreads();
  for (long long tile = 0; tile < arguments.num_tiles; ++tile) {
    const float* buffer = buffers + tile % 2 * blockDim.x;
    // All threads must be done with the other buffer.
    if (fault != Fault::early_reuse) __syncthreads();
    if (thread == 0 && tile + 1 < arguments.num_tiles) load(tile + 1);
    const unsigned parity = tile / 2 % 2;
    if (fault != Fault::no_wait)
      on_cpu::mbarrier_wait(&barriers[tile % 2],
                            fault == Fault::wrong_parity ? 1 - parity : parity);
    y[tile * blockDim.x + thread] = 2 * buffer[thread];
  }
}
