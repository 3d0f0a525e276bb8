// faults.h -- the sentences for faults: what a thread does, and who waits for whom
#pragma once
#include "launch_state.h"

namespace {

const char* name_of(WarpCall call) {
  switch (call) {
    case WarpCall::syncwarp:
      return "__syncwarp";
    case WarpCall::shfl:
      return "__shfl_sync";
    case WarpCall::shfl_xor:
      return "__shfl_xor_sync";
    case WarpCall::ballot:
      return "__all_sync";
  }
  return "";
}

std::string what_it_does(const Thread& thread) {
  switch (thread.state) {
    case State::running:
      return "runs";
    case State::warp_call:
      return text("waits in %s (mask 0x%08x)", name_of(thread.call), thread.mask);
    case State::block_barrier:
      return "waits at __syncthreads";
    case State::cluster_barrier:
      return "waits at the barrier of the cluster";
    case State::mbarrier: {
      const Mbarrier& barrier = thread.block->barriers[thread.barrier];
      return text(
          "waits at the mbarrier at byte %u of shared memory for parity %u (%u arrivals and %lld "
          "bytes are missing)",
          barrier.offset, thread.parity, barrier.missing, barrier.missing_bytes);
    }
    case State::exited:
      return "has exited";
  }
  return "";
}

// The thread that this one waits for in vain, or null if there is no single one.
const Thread* awaited_by(const Thread& thread) {
  const Block& block = *thread.block;
  if (thread.state == State::warp_call) {
    for (unsigned lane = 0; lane < 32; ++lane) {
      if (!(thread.mask >> lane & 1) || !(thread.warp->lanes >> lane & 1)) continue;
      const Thread& other = thread.warp->threads[lane];
      if (other.state != State::warp_call || other.mask != thread.mask) return &other;
    }
  }
  if (thread.state == State::block_barrier) {
    for (unsigned index = 0; index < launch.block_size; ++index)
      if (block.threads[index].state != State::block_barrier) return &block.threads[index];
  }
  if (thread.state == State::cluster_barrier) {
    for (unsigned index = 0; index < launch.num_blocks * launch.block_size; ++index) {
      const Thread& other = launch.threads[index];
      if (other.state != State::exited &&
          !(other.arrived && other.arrived_phase == launch.cluster_phase))
        return &other;
    }
  }
  return nullptr;
}

std::string deadlock() {
  const Thread* thread = &launch.threads[0];
  while (thread->state == State::exited) ++thread;
  std::string message = "Deadlock: " + name_of(*thread) + " " + what_it_does(*thread);
  // Each one waits for the next. Four are enough to see where it leads.
  for (int count = 0; count < 3; ++count) {
    const Thread* other = awaited_by(*thread);
    if (other == nullptr) break;
    message += ", " + name_of(*other) + " " + what_it_does(*other);
    if (thread->state == State::warp_call && other->state == State::warp_call)
      message += "; the lanes of one call must all give the same mask";
    thread = other;
  }
  return message + ".";
}

}  // namespace
