// cuda_on_cpu_trace.h -- records what every thread reads, writes and waits for
//
// Without CUPYNORM_TRACE nothing is recorded. With it kernels are compiled with -fsanitize=thread,
// so that the compiler calls __tsan_read16(address) and its kin before each access. They are
// defined here; no library of the sanitizer is linked.
#pragma once
#include <vector>

#include "shared_memory.h"

namespace trace {

enum class Kind : unsigned char {
  read,
  write,
  bulk_load,
  send,   // to another block's shared memory, with an arrival at its mbarrier
  wait,   // begins
  go_on,  // a wait ends
  arrive,
  finish
};

enum class Space : unsigned char { none, global, shared };

enum class What : unsigned char { none, warp, block, cluster, mbarrier };

struct Event {
  unsigned block, thread;
  Kind kind;
  Space space;
  What what;
  unsigned char call;     // the WarpCall of a wait for a warp
  unsigned num_bytes;     // of an access; else a mask of lanes, or a byte of shared memory
  Word address;           // shared memory: the offset in it
  Word site;              // where in the kernel's code
  unsigned target_block;  // whose shared memory
  unsigned clock;         // switches between threads since the launch began
};

#ifdef CUPYNORM_TRACE

constexpr size_t most_events = size_t(32) << 20;
std::vector<Event> events;
bool is_full;

void record(Event event) {
  const Thread* thread = launch.current;
  if (thread == nullptr) return;
  if (events.size() == most_events) {
    is_full = true;
    return;
  }
  event.block = thread->block->index;
  event.thread = thread->index;
  event.clock = unsigned(launch.clock);
  events.push_back(event);
}

// Accesses to a thread's own stack are not recorded: on a GPU they are registers.
void access(Kind kind, const void* pointer, unsigned num_bytes, const void* site) {
  const Thread* thread = launch.current;
  if (thread == nullptr) return;
  const Word address = reinterpret_cast<Word>(pointer);
  const Word stack = reinterpret_cast<Word>(thread->context.bottom);
  if (address >= stack && address < stack + stack_size) return;
  const Block* owner = block_at(pointer, num_bytes);
  const Word first = owner == nullptr ? 0 : reinterpret_cast<Word>(owner->smem);
  record({0, 0, kind, owner == nullptr ? Space::global : Space::shared, What::none, 0, num_bytes,
          address - first, reinterpret_cast<Word>(site), owner == nullptr ? 0 : owner->index, 0});
}

void step(Kind kind, What what, unsigned detail = 0, unsigned char call = 0) {
  record({0, 0, kind, Space::none, what, call, detail, 0, 0, 0, 0});
}

#else

inline void access(Kind, const void*, unsigned, const void*) {}
inline void step(Kind, What, unsigned = 0, unsigned char = 0) {}

#endif

}  // namespace trace

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
