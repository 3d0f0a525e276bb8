// cluster_send.cu -- y[round, block] = sum of x[round, blocks of its cluster], sent while each
// block goes on to its next round
enum class Fault {
  none,
  no_wait,
  one_buffer,
  wrong_parity,
  too_few_bytes,
  before_init,
  to_the_end,
  wrong_rank,
  not_shared
};

struct ClusterSend {
  const float* x;
  float* y;
  long long num_rounds;
};

// One warp a block: lane `rank` sends to block `rank`, and reads what block `rank` sent.
template <Fault fault>
__global__ void send_to_all(ClusterSend arguments) {
  const unsigned lane = threadIdx.x, size = on_cpu::cluster_size(), own = on_cpu::cluster_rank();
  auto* barriers = reinterpret_cast<unsigned long long*>(dynamic_smem());
  float* buffers = reinterpret_cast<float*>(barriers + 2);
  const unsigned num_bytes = (size - (fault == Fault::too_few_bytes)) * 4;
  if (lane < 2) {
    on_cpu::mbarrier_init(&barriers[lane], 1);
    on_cpu::mbarrier_expect(&barriers[lane], num_bytes);
  }
  if (fault != Fault::before_init) {
    on_cpu::cluster_arrive();
    on_cpu::cluster_wait();
  }
  if (fault == Fault::to_the_end && own == 0) return;

  for (long long round = 0; round < arguments.num_rounds; ++round) {
    const unsigned at = fault == Fault::one_buffer ? 0 : round % 2;
    const unsigned parity = (fault == Fault::one_buffer ? round : round / 2) % 2;
    float* received = buffers + at * size;
    if (lane < size) {
      float* to = fault == Fault::not_shared ? arguments.y : received + own;
      const unsigned rank = lane + (fault == Fault::wrong_rank && lane == size - 1);
      on_cpu::cluster_send(to, arguments.x[round * gridDim.x + blockIdx.x], &barriers[at], rank);
    }
    if (fault != Fault::no_wait)
      on_cpu::mbarrier_wait(&barriers[at], fault == Fault::wrong_parity ? 1 - parity : parity);
    if (lane == 0) on_cpu::mbarrier_expect(&barriers[at], num_bytes);
    // Nobody sends to this buffer again before this block has sent for the next round.
    float sum = lane < size ? received[lane] : 0;
    for (int distance = 16; distance > 0; distance /= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (lane == 0) arguments.y[round * gridDim.x + blockIdx.x] = sum;
  }
}
