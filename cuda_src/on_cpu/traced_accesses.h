// traced_accesses.h -- what the compiler calls before each access of a traced kernel
#pragma once
#include "cuda_on_cpu_trace.h"

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
