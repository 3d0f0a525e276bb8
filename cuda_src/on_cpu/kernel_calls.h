// kernel_calls.h -- what kernels call: warp calls, barriers of blocks and clusters
#pragma once
#include "scheduler.h"

namespace on_cpu {

unsigned long long warp_call(WarpCall call, unsigned mask, unsigned long long word,
                             unsigned lane_argument, int width) {
  Thread& thread = *launch.current;
  Warp& warp = *thread.warp;
  const unsigned own = 1u << thread.lane;
  if (!(mask & own))
    fail(name_of(thread) +
         text(" (lane %u) calls %s with mask 0x%08x, which does not name its own lane.",
              thread.lane, name_of(call), mask));
  if (width < 1 || width > 32 || (width & (width - 1)) != 0)
    fail(name_of(thread) +
         text(" calls %s with width %d: it must be 1, 2, 4, 8, 16 or 32.", name_of(call), width));
  if (mask & ~warp.lanes)
    fail(name_of(thread) + text(" calls %s with mask 0x%08x, but its warp has only %d lanes.",
                                name_of(call), mask, __builtin_popcount(warp.lanes)));
  thread.call = call;
  thread.mask = mask;
  thread.word = word;
  thread.lane_argument = lane_argument;
  thread.width = width;
  warp.in_warp_call |= own;
  thread.state = State::warp_call;

  bool complete = (warp.in_warp_call & mask) == mask;
  for (unsigned rest = mask; complete && rest != 0; rest &= rest - 1)
    complete = warp.threads[__builtin_ctz(rest)].mask == mask;
  if (complete) {
    Word results[32], ballot = 0;
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
      const unsigned lane = __builtin_ctz(rest);
      ballot |= warp.threads[lane].word << lane;
    }
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
      const unsigned lane = __builtin_ctz(rest);
      const Thread& other = warp.threads[lane];
      if (other.call != call || other.width != width)
        fail(name_of(thread) + text(" calls %s (width %d) where ", name_of(call), width) +
             name_of(other) + text(" calls %s (width %d).", name_of(other.call), other.width));
      // PTX shfl: lanes outside the segment keep their own value, except that xor may reach earlier
      // segments.
      const unsigned first = lane & -width, last = first + width - 1,
                     argument = other.lane_argument;
      unsigned source = lane;
      if (call == WarpCall::shfl) source = first | (argument & (width - 1));
      if (call == WarpCall::shfl_xor && (lane ^ (argument & 31)) <= last)
        source = lane ^ (argument & 31);
      if (!(mask >> source & 1))
        fail(name_of(other) +
             text(" (lane %u) reads lane %u in %s, which mask 0x%08x does not name.", lane, source,
                  name_of(call), mask));
      results[lane] = call == WarpCall::ballot ? ballot : warp.threads[source].word;
    }
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
      const unsigned lane = __builtin_ctz(rest);
      warp.threads[lane].word = results[lane];
      warp.threads[lane].state = State::running;
    }
    warp.in_warp_call &= ~mask;
    make_ready(warp, mask);
  }
  trace::step(trace::Kind::wait, trace::What::warp, mask, static_cast<unsigned char>(call));
  give_way();
  trace::step(trace::Kind::go_on, trace::What::warp, mask, static_cast<unsigned char>(call));
  return thread.word;
}

void block_barrier() {
  Thread& thread = *launch.current;
  Block& block = *thread.block;
  thread.warp->at_block_barrier |= 1u << thread.lane;
  thread.state = State::block_barrier;
  if (++block.num_at_barrier == launch.block_size) {
    block.num_at_barrier = 0;
    for (unsigned index = 0; index < launch.block_size; ++index)
      block.threads[index].state = State::running;
    for (unsigned warp = 0; warp < launch.num_warps; ++warp) {
      make_ready(block.warps[warp], block.warps[warp].at_block_barrier);
      block.warps[warp].at_block_barrier = 0;
    }
  }
  trace::step(trace::Kind::wait, trace::What::block);
  give_way();
  trace::step(trace::Kind::go_on, trace::What::block);
}

void yield() {
  make_ready(*launch.current);
  give_way();
}

unsigned cluster_rank() { return launch.current->block->rank; }

unsigned cluster_size() { return launch.num_blocks; }

void cluster_arrive() {
  Thread& thread = *launch.current;
  if (thread.arrived)
    fail(name_of(thread) + " arrives twice at the barrier of the cluster without waiting between.");
  thread.arrived = true;
  thread.arrived_phase = launch.cluster_phase;
  trace::step(trace::Kind::arrive, trace::What::cluster);
  arrive_at_cluster_barrier();
  yield();
}

void cluster_wait() {
  Thread& thread = *launch.current;
  if (!thread.arrived)
    fail(name_of(thread) + " waits at the barrier of the cluster without having arrived.");
  if (thread.arrived_phase == launch.cluster_phase)
    wait_in(State::cluster_barrier);
  else
    yield();
  thread.arrived = false;
}

void* cluster_map(void* own_smem_pointer, unsigned rank) {
  Thread& thread = *launch.current;
  if (rank >= launch.num_blocks)
    fail(name_of(thread) + text(" maps shared memory of rank %u in a cluster of %u blocks.", rank,
                                launch.num_blocks));
  if (block_at(own_smem_pointer, 0) != thread.block)
    fail(name_of(thread) + " maps a pointer that is not in its own block's shared memory.");
  return launch.blocks[rank].smem +
         (static_cast<unsigned char*>(own_smem_pointer) - thread.block->smem);
}

void mbarrier_init(unsigned long long* address, unsigned count) {
  Thread& thread = *launch.current;
  Block& block = *thread.block;
  if (block_at(address, 8) != &block || reinterpret_cast<Word>(address) % 8 != 0)
    fail(name_of(thread) + " makes an mbarrier that is not 8 aligned bytes of its shared memory.");
  if (count == 0) fail(name_of(thread) + " makes an mbarrier that expects no arrivals.");
  unsigned char* bytes = reinterpret_cast<unsigned char*>(address);
  const unsigned offset = bytes - block.smem;
  const Word mark = mark_of(bytes);
  memcpy(bytes, &mark, sizeof mark);
  for (const Mbarrier& barrier : block.barriers)
    if (barrier.offset == offset)
      fail(name_of(thread) + text(" makes the mbarrier at byte %u a second time.", offset));
  block.barriers.push_back({offset, count, count, 0, 0, -1, -1});
}

void mbarrier_arrive(unsigned long long* barrier) {
  arrive(barrier, 0);
  yield();
}

void mbarrier_expect(unsigned long long* barrier, unsigned bytes) {
  arrive(barrier, bytes);
  yield();
}

void mbarrier_remote_arrive(unsigned long long* own_address, unsigned rank) {
  arrive(static_cast<unsigned long long*>(cluster_map(own_address, rank)), 0);
  yield();
}

void mbarrier_wait(unsigned long long* address, unsigned parity) {
  Thread& thread = *launch.current;
  Block* block;
  Mbarrier* barrier = find_mbarrier(block, address);
  if (block != thread.block) fail(name_of(thread) + " waits at an mbarrier of another block.");
  if (parity > 1)
    fail(name_of(thread) + text(" waits at an mbarrier for parity %u: it must be 0 or 1.", parity));
  thread.barrier = barrier - block->barriers.data();
  thread.parity = parity;
  yield();
  // Asked again after each wake-up: a waiter that comes too late for its phase misses it, as on a
  // GPU.
  while (block->barriers[thread.barrier].phase % 2 == int(parity)) wait_in(State::mbarrier);
  barrier = &block->barriers[thread.barrier];
  if (barrier->phase - 1 > barrier->last_waited_phase)
    barrier->last_waited_phase = barrier->phase - 1;
}

void bulk_load(void* smem, const void* global, unsigned bytes, unsigned long long* address) {
  check_copy(smem, global, bytes);
  Block* barriers_block;
  const Mbarrier* barrier = find_mbarrier(barriers_block, address);
  Block* block = block_at(smem, bytes);
  if (block != barriers_block)
    fail(name_of(*launch.current) + " calls bulk_load into one block with an mbarrier of another.");
  trace::access(trace::Kind::bulk_load, global, bytes, __builtin_return_address(0));
  trace::access(trace::Kind::bulk_load, smem, bytes, __builtin_return_address(0));
  // From here until the wait, nobody may count on the old values or on the new ones.
  memset(smem, 0xff, bytes);
  launch.copies.push_back({static_cast<unsigned char*>(smem),
                           static_cast<const unsigned char*>(global), bytes, block,
                           unsigned(barrier - block->barriers.data()), nullptr});
  yield();
}

void cluster_send(float* own_address, float value, unsigned long long* own_barrier, unsigned rank) {
  auto* at = static_cast<unsigned char*>(cluster_map(own_address, rank));
  Block* block;
  const Mbarrier* barrier =
      find_mbarrier(block, static_cast<unsigned long long*>(cluster_map(own_barrier, rank)));
  trace::access(trace::Kind::send, at, sizeof value, __builtin_return_address(0));
  std::unique_ptr<unsigned char[]> sent(new unsigned char[sizeof value]);
  memcpy(sent.get(), &value, sizeof value);
  launch.copies.push_back({at, nullptr, sizeof value, block,
                           unsigned(barrier - block->barriers.data()), std::move(sent)});
  yield();
}

}  // namespace on_cpu
