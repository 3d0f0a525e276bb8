// scheduler.h -- which thread runs next, and what happens when threads and blocks end
//
// Drawn: which block is favoured, which of its warps runs, for how long, and which lane is next.
// The same seed gives the same order.
#pragma once
#include "copies.h"
#include "faults.h"

namespace {

void start_block(Block& block) {
  block.started = true;
  // As on a GPU, what another block wrote before this one ran is lost.
  fill_with_garbage(block.smem);
}

// How far a warp or block runs ahead of the others is drawn from all scales. With short, fair turns
// no thread would be late enough to find a buffer reused too early, nor early enough to write to a
// block that has not begun.
Warp* choose_warp() {
  Warp* running = launch.current != nullptr ? launch.current->warp : nullptr;
  if (running != nullptr && running->ready != 0 && launch.warp_turns > 0) {
    --launch.warp_turns;
    return running;
  }
  Warp* warp = launch.ready[draw_below(launch.ready.size())];
  if (launch.block_turns == 0) {
    launch.block_turns = 1u << draw_below(8);
    launch.favoured = warp->block;
  }
  --launch.block_turns;
  for (int attempt = 0; attempt < 8 && warp->block != launch.favoured; ++attempt)
    warp = launch.ready[draw_below(launch.ready.size())];
  launch.warp_turns = 1u << draw_below(12);
  return warp;
}

Thread* choose() {
  ++launch.clock;
  while (!launch.copies.empty() && (launch.ready.empty() || draw() % 16 == 0))
    finish_copy(draw_below(launch.copies.size()));
  if (launch.ready.empty()) return nullptr;

  Warp* warp = choose_warp();
  const unsigned drawn = draw();
  const unsigned turn = drawn % 32, turned = warp->ready >> turn | warp->ready << (-turn & 31);
  const unsigned lane = (__builtin_ctz(turned) + turn) % 32;

  warp->ready &= ~(1u << lane);
  if (warp->ready == 0) {
    launch.ready[warp->ready_index] = launch.ready.back();
    launch.ready[warp->ready_index]->ready_index = warp->ready_index;
    launch.ready.pop_back();
  }
  return &warp->threads[lane];
}

// Runs other threads until the current one is ready and drawn again.
void give_way() {
  Thread* from = launch.current;
  Thread* to = choose();
  if (to == nullptr) return fail(deadlock());
  if (to == from) return;
  if (!to->block->started) start_block(*to->block);
  launch.current = to;
  threadIdx.x = to->index;
  blockIdx.x = to->block->index;
  on_cpu::smem = to->block->smem;
  switch_contexts(from->context, to->context);
}

void wait_in(State state) {
  const auto what = state == State::cluster_barrier ? trace::What::cluster : trace::What::mbarrier;
  launch.current->state = state;
  trace::step(trace::Kind::wait, what);
  give_way();
  trace::step(trace::Kind::go_on, what);
}

void arrive_at_cluster_barrier() {
  if (--launch.num_missing != 0) return;
  ++launch.cluster_phase;
  launch.num_missing = launch.num_alive;
  for (unsigned index = 0; index < launch.num_blocks * launch.block_size; ++index)
    if (launch.threads[index].state == State::cluster_barrier) make_ready(launch.threads[index]);
}

void end_block(Block& block) {
  check_guards(block);
  for (const Copy& copy : launch.copies)
    if (copy.block == &block)
      fail(text("Block %u ends while a bulk load of %u bytes is under way.", block.index,
                copy.num_bytes));
  for (const Mbarrier& barrier : block.barriers)
    if (barrier.last_load_phase > barrier.last_waited_phase)
      fail(
          text("Block %u ends without having waited for a bulk load at the mbarrier at byte %u of "
               "shared memory.",
               block.index, barrier.offset));
  fill_with_garbage(block.smem);  // it is gone: a neighbour that still reads it is at fault
  ASAN_POISON_MEMORY_REGION(block.smem - guard_bytes, stride_of_smem());
}

void end_thread() {
  Thread& thread = *launch.current;
  Block& block = *thread.block;
  if (!thread.products.empty())
    fail(name_of(thread) + " exits without having waited for its products.");
  Word mark;
  memcpy(&mark, thread.context.bottom, sizeof mark);
  if (mark != stack_mark)
    fail(name_of(thread) + text(" used more than its %zu bytes of stack.", stack_size));
  trace::step(trace::Kind::finish, trace::What::none);
  thread.state = State::exited;
  --launch.num_alive;
  if (!(thread.arrived && thread.arrived_phase == launch.cluster_phase))
    arrive_at_cluster_barrier();
  if (--block.num_alive == 0) end_block(block);
  if (launch.num_alive != 0) give_way();
  launch.current = nullptr;
  switch_contexts(thread.context, launch.launcher);
}

}  // namespace

extern "C" void on_cpu_fiber_main() {
#ifdef WITH_ADDRESS_SANITIZER
  __sanitizer_finish_switch_fiber(nullptr, &launch.previous->bottom, &launch.previous->stack_size);
#endif
  launch.kernel->run(launch.words);
  end_thread();
}
