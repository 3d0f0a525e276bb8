// bulk_calls.h -- what kernels call: mbarriers and bulk copies
#pragma once
#include <utility>

#include "kernel_calls.h"

namespace on_cpu {

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
