// cuda_on_cpu_runtime.cpp -- the scheduler behind cuda_on_cpu.h: runs fibers, finds faults
//
// owns    the fibers' stacks, the blocks' shared memory, the barriers and the copies under way.
// order   drawn (scheduler.h). Clusters are shuffled. The same seed gives the same order.
// faults  end the launch: the fiber at fault switches to the launcher's stack, no other is resumed.
//         Kernels have only plain values, so there is nothing to unwind.
// needs   a POSIX system. Built once and shared by all kernels; launches in one process take turns.
#include <pthread.h>
#include <sys/mman.h>

#include <cstdio>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "product_calls.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;
unsigned char* on_cpu::smem;

namespace {

// A child that was forked while another thread was in a launch gets a machine of its own. What that
// thread had is lost.
[[maybe_unused]] const int on_fork = pthread_atfork(nullptr, nullptr, [] {
  if (one_launch.try_lock()) return one_launch.unlock();
  new (&one_launch) std::mutex;
  new (&launch) Launch{};
});

bool reserve(std::string& message) {
  const unsigned num_threads = launch.num_blocks * launch.block_size;
  while (launch.stacks.size() < num_threads) {
    const size_t count = 256;
    void* memory = mmap(nullptr, count * stack_size, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      message = text("There is no memory for the stacks of %u threads.", num_threads);
      return false;
    }
    for (size_t stack = 0; stack < count; ++stack)
      launch.stacks.push_back(static_cast<unsigned char*>(memory) + stack * stack_size);
  }
  const size_t arena_bytes = launch.num_blocks * stride_of_smem() + 128;
  if (launch.arena_bytes < arena_bytes) {
    if (launch.arena) ASAN_UNPOISON_MEMORY_REGION(launch.arena.get(), launch.arena_bytes);
    launch.arena.reset(new unsigned char[arena_bytes]);
    launch.arena_bytes = arena_bytes;
  }
  launch.threads.resize(num_threads);
  launch.warps.resize(launch.num_blocks * launch.num_warps);
  launch.blocks.resize(launch.num_blocks);
  return true;
}

void run_cluster(unsigned first_block) {
  unsigned char* arena = launch.arena.get();
  ASAN_UNPOISON_MEMORY_REGION(arena, launch.arena_bytes);
  arena += -reinterpret_cast<Word>(arena) & 127;
  launch.ready.clear();
  launch.copies.clear();
  launch.num_alive = launch.num_missing = launch.num_blocks * launch.block_size;
  launch.cluster_phase = 0;
  launch.block_turns = launch.warp_turns = 0;

  for (unsigned rank = 0; rank < launch.num_blocks; ++rank) {
    Block& block = launch.blocks[rank];
    block.index = first_block + rank;
    block.rank = rank;
    block.num_alive = launch.block_size;
    block.num_at_barrier = 0;
    block.started = false;
    block.smem = arena + rank * stride_of_smem() + guard_bytes;
    block.warps = &launch.warps[rank * launch.num_warps];
    block.threads = &launch.threads[rank * launch.block_size];
    block.barriers.clear();
    place_guards(block);
    for (unsigned index = 0; index < launch.num_warps; ++index) {
      const unsigned num_lanes =
          launch.block_size - index * 32 < 32 ? launch.block_size - index * 32 : 32;
      Warp& warp = block.warps[index];
      warp = {&block,
              block.threads + index * 32,
              num_lanes == 32 ? ~0u : (1u << num_lanes) - 1,
              0,
              0,
              0,
              0};
      make_ready(warp, warp.lanes);
    }
    for (unsigned index = 0; index < launch.block_size; ++index) {
      Thread& thread = block.threads[index];
      thread.block = &block;
      thread.warp = &block.warps[index / 32];
      thread.index = index;
      thread.lane = index % 32;
      thread.state = State::running;
      thread.arrived = false;
      thread.products.clear();
      thread.num_product_groups = 0;
      const unsigned stack = rank * launch.block_size + index;
      prepare(thread.context, launch.stacks[stack], stack);
    }
  }

  Thread* first = choose();
  start_block(*first->block);
  launch.current = first;
  threadIdx.x = first->index;
  blockIdx.x = first->block->index;
  on_cpu::smem = first->block->smem;
  switch_contexts(launch.launcher, first->context);
}

}  // namespace

// Returns 0, or 1 and a sentence in `message`.
extern "C" __attribute__((visibility("default"))) int on_cpu_launch(
    const on_cpu::Kernel* kernel, const void* words, unsigned num_bytes, unsigned grid_size,
    unsigned block_size, unsigned smem_bytes, unsigned cluster_size, unsigned long long seed,
    char* message, unsigned message_size) {
  const std::lock_guard lock(one_launch);
  std::string fault;
  if (num_bytes != kernel->num_bytes)
    fault = text("The argument struct of the kernel has %u bytes, but %u were given.",
                 kernel->num_bytes, num_bytes);
  else if (block_size < 1 || block_size > most_threads)
    fault = text("A block has 1 to %u threads, not %u.", most_threads, block_size);
  else if (cluster_size < 1 || cluster_size > most_blocks)
    fault = text("A cluster has 1 to %u blocks, not %u.", most_blocks, cluster_size);
  else if (grid_size < 1 || grid_size % cluster_size != 0)
    fault = text("A grid of %u blocks is not made of clusters of %u.", grid_size, cluster_size);
  else if (smem_bytes > 227 << 10)
    fault = text("No GPU has %u bytes of dynamic shared memory for one block; the most is %u.",
                 smem_bytes, 227 << 10);

  launch.kernel = kernel;
  launch.words = words;
  launch.grid_size = grid_size;
  launch.block_size = block_size;
  launch.smem_bytes = smem_bytes;
  launch.num_blocks = cluster_size;
  launch.num_warps = (block_size + 31) / 32;
  launch.random = (seed + 1) * 0x9e3779b97f4a7c15ull | 1;
  launch.clock = 0;
  launch.current = nullptr;
  launch.failed = false;
  launch.message.clear();
#ifdef CUPYNORM_TRACE
  trace::events.clear();
  trace::is_full = false;
#endif
  threadIdx = blockIdx = {0, 0, 0};
  blockDim = {block_size, 1, 1};
  gridDim = {grid_size, 1, 1};

  if (fault.empty() && reserve(fault)) {
    for (int warm_up = 0; warm_up < 8; ++warm_up) draw();  // neighbouring seeds start alike
    std::vector<unsigned> order(grid_size / cluster_size);
    for (unsigned index = 0; index < order.size(); ++index) order[index] = index;
    for (unsigned index = order.size(); index > 1; --index)
      std::swap(order[index - 1], order[draw_below(index)]);
    for (unsigned cluster : order) {
      run_cluster(cluster * cluster_size);
      if (launch.failed) break;
    }
    fault = launch.message;
  }
  snprintf(message, message_size, "%s", fault.c_str());
  return fault.empty() ? 0 : 1;
}
