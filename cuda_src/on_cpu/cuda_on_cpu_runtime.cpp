// cuda_on_cpu_runtime.cpp -- the scheduler behind cuda_on_cpu.h: runs fibers, finds faults
//
// owns    the fibers' stacks, the blocks' shared memory, the barriers and the copies under way.
// order   drawn: which block is favoured, which of its warps runs, for how long, and which lane is
//         next. Clusters are shuffled. The same seed gives the same order.
// faults  end the launch: the fiber at fault switches to the launcher's stack, no other is resumed.
//         Kernels have only plain values, so there is nothing to unwind.
// needs   a POSIX system. Built once and shared by all kernels; launches in one process take turns.
#include "cuda_on_cpu_runtime.h"

#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define WITH_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define WITH_ADDRESS_SANITIZER 1
#endif
#endif

#ifdef WITH_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;
unsigned char* on_cpu::smem;

// ---------------------------------------------------------------------------- context switches

extern "C" void on_cpu_fiber_main();

#if defined(__ELF__) && defined(__x86_64__)
// Saves the registers that a called function must preserve, then switches to another stack. Cheaper
// than swapcontext, which makes two system calls for the signal mask.
asm(R"(
.text
.globl on_cpu_switch
.hidden on_cpu_switch
.type on_cpu_switch, @function
on_cpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size on_cpu_switch, .-on_cpu_switch
)");
#define RETURN_WORD 6
#define FRAME_WORDS 8  // entry must see a stack pointer of 8 modulo 16, as after a call
#elif defined(__ELF__) && defined(__aarch64__)
asm(R"(
.text
.globl on_cpu_switch
.hidden on_cpu_switch
.type on_cpu_switch, %function
on_cpu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size on_cpu_switch, .-on_cpu_switch
)");
#define RETURN_WORD 11
#define FRAME_WORDS 20
#else
#define WITH_UCONTEXT 1
#include <ucontext.h>
#endif

#ifndef WITH_UCONTEXT
extern "C" void on_cpu_switch(void** from, void* to);
#endif

namespace {

using on_cpu::WarpCall;
using Word = unsigned long long;

struct Context {
#ifdef WITH_UCONTEXT
  ucontext_t context;
#else
  void* stack_pointer;
#endif
  const void* bottom;  // of its stack, which the address sanitizer wants to know
  size_t stack_size;
};

#ifdef WITH_ADDRESS_SANITIZER
constexpr size_t stack_size = 256 << 10;  // red zones make frames several times larger
#else
constexpr size_t stack_size = 64 << 10;
#endif
constexpr unsigned most_threads = 1024, most_blocks = 16, guard_bytes = 512;
constexpr unsigned char guard_byte = 0xa5;
constexpr Word stack_mark = 0x5ac3d2e1f00f1e2d;

// ----------------------------------------------------------------------------------- the state

enum class State : unsigned char {
  running,
  warp_call,
  block_barrier,
  cluster_barrier,
  mbarrier,
  bulk_groups,
  exited
};

struct Block;
struct Warp;

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
  // of bulk stores: groups committed, groups waited for, and the last group with a store
  int num_groups, num_groups_waited, last_group;
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

struct Copy {
  bool is_load;
  unsigned char *smem, *global;
  unsigned num_bytes;
  Block* block;
  unsigned barrier;  // of a load
  Thread* thread;    // of a store
  int group;         // of a store
  // Bytes that a store has read and not yet written, or that a block sends to another.
  std::unique_ptr<unsigned char[]> read;
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

// ----------------------------------------------------------------------------------- switching

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

void prepare(Context& context, unsigned char* stack, unsigned index) {
  // The last fiber on this stack may have ended in the middle of a call.
  ASAN_UNPOISON_MEMORY_REGION(stack, stack_size);
  memcpy(stack, &stack_mark, sizeof stack_mark);
  context.bottom = stack;
  context.stack_size = stack_size;
#ifdef WITH_UCONTEXT
  getcontext(&context.context);
  context.context.uc_stack.ss_sp = stack;
  context.context.uc_stack.ss_size = stack_size;
  context.context.uc_link = nullptr;
  makecontext(&context.context, on_cpu_fiber_main, 0);
  (void)index;
#else
  // Stacks that all began at the same offset of a page would compete for the same few lines of the
  // first cache.
  const size_t top = stack_size - (index * 5 % 32) * 128;
  Word* frame = reinterpret_cast<Word*>(stack + top) - FRAME_WORDS;
  memset(frame, 0, FRAME_WORDS * sizeof(Word));
  frame[RETURN_WORD] = reinterpret_cast<Word>(&on_cpu_fiber_main);
  context.stack_pointer = frame;
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

// -------------------------------------------------------------------------------------- faults

const char* name_of(WarpCall call) {
  switch (call) {
    case WarpCall::syncwarp:
      return "__syncwarp";
    case WarpCall::shfl:
      return "__shfl_sync";
    case WarpCall::shfl_up:
      return "__shfl_up_sync";
    case WarpCall::shfl_down:
      return "__shfl_down_sync";
    case WarpCall::shfl_xor:
      return "__shfl_xor_sync";
    case WarpCall::ballot:
      return "__ballot_sync, __any_sync or __all_sync";
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
          "bytes are "
          "missing)",
          barrier.offset, thread.parity, barrier.missing, barrier.missing_bytes);
    }
    case State::bulk_groups:
      return "waits for its bulk stores";
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

// ------------------------------------------------------------------------------- shared memory

// Mostly ones, a NaN in every floating type, mixed with noise: unwritten memory must not look like
// zeros.
void fill_with_garbage(unsigned char* smem) {
  for (unsigned byte = 0; byte < launch.smem_bytes; byte += 8) {
    const unsigned drawn = draw();
    const Word word = drawn & 3 ? ~0ull : Word(drawn) << 32 | draw();
    memcpy(smem + byte, &word, launch.smem_bytes - byte < 8 ? launch.smem_bytes - byte : 8);
  }
}

size_t stride_of_smem() {
  return guard_bytes + (launch.smem_bytes + 127) / 128 * 128 + guard_bytes;
}

size_t guard_after_bytes() { return stride_of_smem() - guard_bytes - launch.smem_bytes; }

void place_guards(Block& block) {
  unsigned char *before = block.smem - guard_bytes, *after = block.smem + launch.smem_bytes;
  memset(before, guard_byte, guard_bytes);
  memset(after, guard_byte, guard_after_bytes());
  ASAN_POISON_MEMORY_REGION(before, guard_bytes);
  ASAN_POISON_MEMORY_REGION(after, guard_after_bytes());
}

void check_guards(Block& block) {
  unsigned char *before = block.smem - guard_bytes, *after = block.smem + launch.smem_bytes;
  ASAN_UNPOISON_MEMORY_REGION(before, guard_bytes);
  ASAN_UNPOISON_MEMORY_REGION(after, guard_after_bytes());
  int stray = 0;  // the byte nearest to the block's own that was written
  for (unsigned byte = guard_after_bytes(); byte-- > 0;)
    if (after[byte] != guard_byte) stray = launch.smem_bytes + byte;
  for (unsigned byte = 0; byte < guard_bytes && stray <= 0; ++byte)
    if (before[byte] != guard_byte) stray = int(byte) - int(guard_bytes);
  const bool overrun = stray != 0 || (launch.smem_bytes == 0 && after[0] != guard_byte);
  if (overrun)
    fail(text(
        "Something wrote at byte %d, outside the %u bytes of dynamic shared memory of block %u.",
        stray, launch.smem_bytes, block.index));
}

// The block of this cluster in whose shared memory [pointer, pointer + num_bytes) lies, or null.
Block* block_at(const void* pointer, size_t num_bytes) {
  const auto address = reinterpret_cast<Word>(pointer);
  for (unsigned rank = 0; rank < launch.num_blocks; ++rank) {
    const auto start = reinterpret_cast<Word>(launch.blocks[rank].smem);
    if (address >= start && address - start + num_bytes <= launch.smem_bytes)
      return &launch.blocks[rank];
  }
  return nullptr;
}

#include "cuda_on_cpu_trace.h"

// ------------------------------------------------------------------------ mbarriers and copies

Word mark_of(const unsigned char* address) {
  return 0x6d62617272696572ull ^ reinterpret_cast<Word>(address);
}

// Null after a fault, which the caller never sees: fail() does not come back to a fiber.
Mbarrier* find_mbarrier(Block*& block, unsigned long long* address) {
  block = block_at(address, 8);
  if (block == nullptr || reinterpret_cast<Word>(address) % 8 != 0) {
    fail(name_of(*launch.current) +
         " uses an mbarrier that is not 8 aligned bytes of shared memory.");
    return nullptr;
  }
  const unsigned offset = reinterpret_cast<unsigned char*>(address) - block->smem;
  for (Mbarrier& barrier : block->barriers) {
    if (barrier.offset != offset) continue;
    const Word mark = mark_of(block->smem + offset);
    if (memcmp(address, &mark, 8) != 0) {
      fail(text("The mbarrier at byte %u of the shared memory of block %u was overwritten.", offset,
                block->index));
      return nullptr;
    }
    return &barrier;
  }
  fail(name_of(*launch.current) +
       text(" uses the mbarrier at byte %u of the shared memory of block %u before mbarrier_init.",
            offset, block->index));
  return nullptr;
}

void complete_if_due(Block& block, Mbarrier& barrier) {
  if (barrier.missing != 0 || barrier.missing_bytes != 0) return;
  ++barrier.phase;
  barrier.missing = barrier.expected;
  const unsigned index = &barrier - block.barriers.data();
  for (unsigned thread = 0; thread < launch.block_size; ++thread)
    if (block.threads[thread].state == State::mbarrier && block.threads[thread].barrier == index)
      make_ready(block.threads[thread]);
}

void arrive(unsigned long long* address, unsigned num_bytes) {
  Block* block;
  Mbarrier& barrier = *find_mbarrier(block, address);
  if (barrier.missing == 0)
    return fail(name_of(*launch.current) +
                text(" arrives at the mbarrier at byte %u of shared memory, which %u have "
                     "already reached in this phase: its whole count.",
                     barrier.offset, barrier.expected));
  trace::step(trace::Kind::arrive, trace::What::mbarrier, barrier.offset);
  --barrier.missing;
  barrier.missing_bytes += num_bytes;
  complete_if_due(*block, barrier);
}

// As memcpy, but a load may read what shares 16 bytes with the first and the last of a row: a GPU's
// memory is handed out in larger units. The address sanitizer sees every other access.
__attribute__((no_sanitize("address"))) void copy_units(unsigned char* to,
                                                        const unsigned char* from,
                                                        unsigned num_bytes) {
  for (unsigned byte = 0; byte < num_bytes; ++byte)
    to[byte] = const_cast<const volatile unsigned char*>(from)[byte];
}

// A load happens at once. A store reads at one moment and writes at a later one.
void advance_copy(unsigned index) {
  Copy& copy = launch.copies[index];
  if (!copy.is_load && !copy.read) {
    copy.read.reset(new unsigned char[copy.num_bytes]);
    memcpy(copy.read.get(), copy.smem, copy.num_bytes);
    if (copy.thread->state == State::bulk_groups) make_ready(*copy.thread);
    return;
  }
  if (copy.is_load) {
    copy_units(copy.smem, copy.read ? copy.read.get() : copy.global, copy.num_bytes);
    Mbarrier& barrier = copy.block->barriers[copy.barrier];
    barrier.missing_bytes -= copy.num_bytes;
    barrier.last_load_phase = barrier.phase;
    complete_if_due(*copy.block, barrier);
  } else {
    memcpy(copy.global, copy.read.get(), copy.num_bytes);
    if (copy.thread->state == State::bulk_groups) make_ready(*copy.thread);
  }
  if (index + 1 != launch.copies.size()) launch.copies[index] = std::move(launch.copies.back());
  launch.copies.pop_back();
}

void check_copy(const char* name, const void* smem, const void* global, unsigned num_bytes) {
  const Word shared = reinterpret_cast<Word>(smem), other = reinterpret_cast<Word>(global);
  if (shared % 16 != 0 || other % 16 != 0 || num_bytes % 16 != 0)
    return fail(name_of(*launch.current) + text(" calls %s of %u bytes with shared address ...%llx "
                                                "and global address ...%llx: both addresses "
                                                "and the size must be multiples of 16.",
                                                name, num_bytes, shared & 0xff, other & 0xff));
  if (block_at(smem, num_bytes) == nullptr)
    fail(name_of(*launch.current) +
         text(" calls %s of %u bytes outside its dynamic shared memory.", name, num_bytes));
}

// ---------------------------------------------------------------------------------- scheduling

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
    advance_copy(draw_below(launch.copies.size()));
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
  const auto what = state == State::cluster_barrier ? trace::What::cluster
                    : state == State::mbarrier      ? trace::What::mbarrier
                                                    : trace::What::bulk_groups;
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
    if (copy.block == &block && copy.is_load)
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
  if (thread.last_group >= thread.num_groups_waited)
    fail(name_of(thread) + " exits without having waited for its bulk stores.");
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

// --------------------------------------------------------------------------- what kernels call

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
      if (call == WarpCall::shfl_up && argument <= lane - first) source = lane - argument;
      if (call == WarpCall::shfl_down && argument <= last - lane) source = lane + argument;
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

unsigned active_mask() {
  const Warp& warp = *launch.current->warp;
  unsigned mask = 0;
  for (unsigned rest = warp.lanes; rest != 0; rest &= rest - 1)
    if (warp.threads[__builtin_ctz(rest)].state != State::exited) mask |= rest & -rest;
  return mask;
}

long long clock() { return launch.clock; }

void trap() { fail(name_of(*launch.current) + " called __trap."); }

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
  check_copy("bulk_load", smem, global, bytes);
  Block* barriers_block;
  const Mbarrier* barrier = find_mbarrier(barriers_block, address);
  Block* block = block_at(smem, bytes);
  if (block != barriers_block)
    fail(name_of(*launch.current) + " calls bulk_load into one block with an mbarrier of another.");
  trace::access(trace::Kind::bulk_load, global, bytes, __builtin_return_address(0));
  trace::access(trace::Kind::bulk_load, smem, bytes, __builtin_return_address(0));
  memset(smem, 0xff,
         bytes);  // from here until the wait, nobody may count on the old values or on the new ones
  launch.copies.push_back({true, static_cast<unsigned char*>(smem),
                           static_cast<unsigned char*>(const_cast<void*>(global)), bytes, block,
                           unsigned(barrier - block->barriers.data()), nullptr, 0, nullptr});
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
  launch.copies.push_back({true, at, nullptr, sizeof value, block,
                           unsigned(barrier - block->barriers.data()), nullptr, 0,
                           std::move(sent)});
  yield();
}

void bulk_store(void* global, const void* smem, unsigned bytes) {
  check_copy("bulk_store", smem, global, bytes);
  Thread& thread = *launch.current;
  if (block_at(smem, bytes) != thread.block)
    fail(name_of(thread) + " calls bulk_store from another block's memory.");
  trace::access(trace::Kind::bulk_store, smem, bytes, __builtin_return_address(0));
  trace::access(trace::Kind::bulk_store, global, bytes, __builtin_return_address(0));
  thread.last_group = thread.num_groups;
  launch.copies.push_back({false, static_cast<unsigned char*>(const_cast<void*>(smem)),
                           static_cast<unsigned char*>(global), bytes, thread.block, 0, &thread,
                           thread.num_groups, nullptr});
  yield();
}

void bulk_commit() { ++launch.current->num_groups; }

static void wait_for_groups(unsigned pending_groups, bool written) {
  Thread& thread = *launch.current;
  const int first_pending = thread.num_groups - int(pending_groups);
  yield();
  for (bool done = false; !done;) {
    done = true;
    for (const Copy& copy : launch.copies)
      if (copy.thread == &thread && copy.group < first_pending && (written || !copy.read))
        done = false;
    if (!done) wait_in(State::bulk_groups);
  }
  if (first_pending > thread.num_groups_waited) thread.num_groups_waited = first_pending;
}

void bulk_wait(unsigned pending_groups) { wait_for_groups(pending_groups, true); }

void bulk_wait_read(unsigned pending_groups) { wait_for_groups(pending_groups, false); }

}  // namespace on_cpu

// -------------------------------------------------------------------------------- the launcher

namespace {

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
      thread.num_groups = thread.num_groups_waited = 0;
      thread.last_group = -1;
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
  // Only the writes of stores whose shared memory has been read can be left; a kernel's end waits
  // for these.
  while (!launch.failed && !launch.copies.empty()) advance_copy(launch.copies.size() - 1);
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

#ifdef CUPYNORM_TRACE

// What the last launch recorded; null if that was too much.
extern "C" __attribute__((visibility("default"))) const void* on_cpu_trace(
    unsigned long long* num_events) {
  *num_events = trace::events.size();
  return trace::is_full ? nullptr : trace::events.data();
}

// What -fsanitize=thread calls before each access. One of an unusual size, or of unknown alignment,
// has a function of its own.
#define ACCESS(name, kind, num_bytes)                                                   \
  extern "C" __attribute__((visibility("default"))) void __tsan_##name(void* address) { \
    trace::access(trace::Kind::kind, address, num_bytes, __builtin_return_address(0));  \
  }
#define ACCESSES(num_bytes)                          \
  ACCESS(read##num_bytes, read, num_bytes)           \
  ACCESS(write##num_bytes, write, num_bytes)         \
  ACCESS(unaligned_read##num_bytes, read, num_bytes) \
  ACCESS(unaligned_write##num_bytes, write, num_bytes)
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
#undef ACCESSES
#undef ACCESS
extern "C" __attribute__((visibility("default"))) void __tsan_read_range(void* address,
                                                                         unsigned long num_bytes) {
  trace::access(trace::Kind::read, address, num_bytes, __builtin_return_address(0));
}
extern "C" __attribute__((visibility("default"))) void __tsan_write_range(void* address,
                                                                          unsigned long num_bytes) {
  trace::access(trace::Kind::write, address, num_bytes, __builtin_return_address(0));
}
extern "C" __attribute__((visibility("default"))) void __tsan_func_entry(void*) {}
extern "C" __attribute__((visibility("default"))) void __tsan_func_exit() {}
extern "C" __attribute__((visibility("default"))) void __tsan_init() {}

#endif
