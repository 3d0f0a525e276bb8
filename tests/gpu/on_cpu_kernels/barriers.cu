// barriers.cu -- faults at the barriers of a block and of a cluster, and of shared memory
enum class Fault {
  exit_before_syncthreads,
  shuffle_instead,
  cluster_wait_only,
  cluster_arrive_twice,
  one_block_skips,
  mbarrier_deadlock,
  mbarrier_unmade,
  mbarrier_overwritten,
  mbarrier_overfull,
  write_after,
  write_before,
  map_outside,
};

struct Nothing {
  long long word;
};

template <Fault fault>
__global__ void faulty(Nothing arguments) {
  unsigned char* smem = dynamic_smem();
  auto* barrier = reinterpret_cast<unsigned long long*>(smem);
  const unsigned thread = threadIdx.x;
  if (fault == Fault::exit_before_syncthreads && thread != 7) __syncthreads();
  if (fault == Fault::shuffle_instead) thread < 8 ? __syncthreads() : __syncwarp();
  if (fault == Fault::cluster_wait_only) on_cpu::cluster_wait();
  if (fault == Fault::cluster_arrive_twice) on_cpu::cluster_arrive(), on_cpu::cluster_arrive();
  if (fault == Fault::one_block_skips) {
    if (on_cpu::cluster_rank() == 0 && thread == 0)
      on_cpu::cluster_arrive(), on_cpu::cluster_wait();
    __syncthreads();
    if (on_cpu::cluster_rank() == 1 && thread == 0) __syncwarp();
  }
  const bool with_mbarrier = fault == Fault::mbarrier_deadlock ||
                             fault == Fault::mbarrier_overwritten ||
                             fault == Fault::mbarrier_overfull;
  if (with_mbarrier && thread == 0) on_cpu::mbarrier_init(barrier, 4);
  __syncthreads();
  if (fault == Fault::mbarrier_overwritten && thread == 0) *barrier = arguments.word;
  if (fault == Fault::mbarrier_deadlock && thread < 3) on_cpu::mbarrier_arrive(barrier);
  if (fault == Fault::mbarrier_overfull && thread == 5) on_cpu::mbarrier_expect(barrier, 16);
  if (fault == Fault::mbarrier_overfull && thread < 4) on_cpu::mbarrier_arrive(barrier);
  __syncthreads();
  if (fault == Fault::mbarrier_unmade || with_mbarrier) on_cpu::mbarrier_wait(barrier, 0);
  if (fault == Fault::write_after && thread == 0) smem[100] = 1;
  if (fault == Fault::write_before && thread == 0) smem[-4] = 1;
  if (fault == Fault::map_outside) on_cpu::cluster_map(smem + 4096, 1);
}
