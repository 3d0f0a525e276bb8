// launch_state.h -- the state of a launch, switching between its threads, and back after a fault
#pragma once
#include <cstdarg>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fibers.h"

namespace {

using on_cpu::WarpCall;

enum class State : unsigned char {
  running,
  warp_call,
  block_barrier,
  cluster_barrier,
  mbarrier,
  exited
};

struct Block;
struct Warp;

// A product of a warpgroup that was started and not waited for.
struct Product {
  float* sums;
  const unsigned* a;  // null: x is in shared memory
  Word x, weight;
  bool adds, is_bfloat16;
  int group;
};

struct Thread {
  Context context;
  Block* block;
  Warp* warp;
  unsigned index, lane;
  State state;
  // of the warp call that it makes or made last
  WarpCall call;
  unsigned mask, lane_argument;
  int width;
  Word word;
  // of the cluster barrier
  bool arrived;
  unsigned arrived_phase;
  // of the mbarrier it waits at
  unsigned barrier, parity;
  // of products
  std::vector<Product> products;
  int num_product_groups;
};

struct Warp {
  Block* block;
  Thread* threads;
  unsigned lanes;  // a partial warp has fewer than 32
  unsigned ready, in_warp_call, at_block_barrier;
  unsigned ready_index;  // in Launch::ready
};

struct Mbarrier {
  unsigned offset;  // in the block's shared memory
  unsigned expected, missing;
  long long missing_bytes;
  int phase, last_load_phase, last_waited_phase;
};

struct Block {
  unsigned index, rank, num_alive, num_at_barrier;
  bool started;
  unsigned char* smem;
  Warp* warps;
  Thread* threads;
  std::vector<Mbarrier> barriers;
};

// A copy to the shared memory of a block that has begun and not arrived.
struct Copy {
  unsigned char* smem;
  const unsigned char* global;
  unsigned num_bytes;
  Block* block;
  unsigned barrier;                       // its index in the block
  std::unique_ptr<unsigned char[]> sent;  // the bytes, if they come from no global memory
};

struct Launch {
  const on_cpu::Kernel* kernel;
  const void* words;
  unsigned grid_size, block_size, smem_bytes, num_blocks,
      num_warps;  // num_blocks of one cluster; num_warps of a block
  Word random;
  long long clock;
  Block* favoured;
  unsigned block_turns;  // warps still to be drawn from the favoured block
  unsigned warp_turns;   // lanes still to be drawn from the running warp

  Context launcher;
  Context* previous;  // whom the last switch left
  Thread* current;
  std::vector<Warp*> ready;  // warps with a ready lane
  std::vector<Copy> copies;
  unsigned num_alive, num_missing, cluster_phase;  // of the cluster and its barrier

  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<Block> blocks;
  std::vector<unsigned char*> stacks;
  std::unique_ptr<unsigned char[]> arena;
  size_t arena_bytes;

  bool failed;
  std::string message;
};

Launch launch;
std::mutex one_launch;

unsigned draw() {  // xorshift64*
  launch.random ^= launch.random >> 12;
  launch.random ^= launch.random << 25;
  launch.random ^= launch.random >> 27;
  return unsigned(launch.random * 0x2545f4914f6cdd1dull >> 32);
}

unsigned draw_below(unsigned count) { return unsigned(Word(draw()) * count >> 32); }

std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string text(const char* format, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  return buffer;
}

std::string name_of(const Thread& thread) {
  return text("thread %u of block %u", thread.index, thread.block->index);
}

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
