// switching.h -- from one thread of a launch to another, or back to the launcher after a fault
#pragma once
#include "launch_state.h"

namespace {

__attribute__((noinline)) void switch_contexts(Context& from, Context& to) {
  launch.previous = &from;
#ifdef WITH_ADDRESS_SANITIZER
  void* fake_stack;
  __sanitizer_start_switch_fiber(&fake_stack, to.bottom, to.stack_size);
#endif
#ifdef WITH_UCONTEXT
  swapcontext(&from.context, &to.context);
#else
  on_cpu_switch(&from.stack_pointer, to.stack_pointer);
#endif
#ifdef WITH_ADDRESS_SANITIZER
  __sanitizer_finish_switch_fiber(fake_stack, &launch.previous->bottom,
                                  &launch.previous->stack_size);
#endif
}

// Ends the launch. It returns only if the launcher itself found the fault.
void fail(const std::string& message) {
  if (!launch.failed) launch.message = message;
  launch.failed = true;
  Thread* thread = launch.current;
  if (thread == nullptr) return;
  launch.current = nullptr;
  switch_contexts(thread->context, launch.launcher);
}

void make_ready(Warp& warp, unsigned lanes) {
  if (lanes == 0) return;
  if (warp.ready == 0) {
    warp.ready_index = launch.ready.size();
    launch.ready.push_back(&warp);
  }
  warp.ready |= lanes;
}

void make_ready(Thread& thread) {
  thread.state = State::running;
  make_ready(*thread.warp, 1u << thread.lane);
}

}  // namespace
