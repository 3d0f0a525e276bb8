// cluster_exchange.cu -- y[block, thread] = x of the next block of the cluster, through its shared
// memory
enum class Synchronise { both, not_before, not_after, with_mbarriers };

struct ClusterExchange {
  const float* x;
  float* y;
};

template <Synchronise synchronise>
__global__ void cluster_exchange(ClusterExchange arguments) {
  const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned next = (on_cpu::cluster_rank() + 1) % on_cpu::cluster_size();
  float* values = reinterpret_cast<float*>(dynamic_smem());
  auto* barrier = reinterpret_cast<unsigned long long*>(values + blockDim.x);
  if (synchronise == Synchronise::with_mbarriers) {
    if (threadIdx.x == 0) on_cpu::mbarrier_init(barrier, blockDim.x);
    on_cpu::cluster_arrive();
    on_cpu::cluster_wait();
    // Pushes its value into the next block, where it is awaited.
    static_cast<float*>(on_cpu::cluster_map(values, next))[threadIdx.x] = arguments.x[index];
    on_cpu::mbarrier_remote_arrive(barrier, next);
    on_cpu::mbarrier_wait(barrier, 0);
    arguments.y[index] = values[threadIdx.x ^ 1];
  } else {
    values[threadIdx.x] = arguments.x[index];
    if (synchronise != Synchronise::not_before) {
      on_cpu::cluster_arrive();
      on_cpu::cluster_wait();
    }
    arguments.y[index] = static_cast<float*>(on_cpu::cluster_map(values, next))[threadIdx.x ^ 1];
  }
  if (synchronise != Synchronise::not_after) {
    on_cpu::cluster_arrive();
    on_cpu::cluster_wait();
  }
}
