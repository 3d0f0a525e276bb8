// warp_calls.h -- barriers, fences, shuffles and votes of the CPU build
#pragma once
#include "cuda_on_cpu_runtime.h"

inline void __syncthreads() { on_cpu::block_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  on_cpu::warp_call(on_cpu::WarpCall::syncwarp, mask, 0, 0, 32);
}
// Memory is never reordered here. But at a fence another thread's view matters, so another thread
// may run.
inline void __threadfence() { on_cpu::yield(); }
inline void __threadfence_block() { on_cpu::yield(); }
inline void __threadfence_system() { on_cpu::yield(); }
inline void __trap() { on_cpu::trap(); }
inline long long clock64() { return on_cpu::clock(); }

namespace on_cpu {
template <typename Value>
inline Value shuffle(WarpCall call, unsigned mask, Value value, unsigned lane, int width) {
  static_assert(sizeof(Value) == 4 || sizeof(Value) == 8, "A shuffle moves 4 or 8 bytes.");
  unsigned long long word = 0;
  __builtin_memcpy(&word, &value, sizeof value);
  word = warp_call(call, mask, word, lane, width);
  __builtin_memcpy(&value, &word, sizeof value);
  return value;
}
}  // namespace on_cpu

template <typename Value>
inline Value __shfl_sync(unsigned mask, Value value, int lane, int width = 32) {
  return on_cpu::shuffle(on_cpu::WarpCall::shfl, mask, value, lane, width);
}
template <typename Value>
inline Value __shfl_up_sync(unsigned mask, Value value, unsigned delta, int width = 32) {
  return on_cpu::shuffle(on_cpu::WarpCall::shfl_up, mask, value, delta, width);
}
template <typename Value>
inline Value __shfl_down_sync(unsigned mask, Value value, unsigned delta, int width = 32) {
  return on_cpu::shuffle(on_cpu::WarpCall::shfl_down, mask, value, delta, width);
}
template <typename Value>
inline Value __shfl_xor_sync(unsigned mask, Value value, int lane_mask, int width = 32) {
  return on_cpu::shuffle(on_cpu::WarpCall::shfl_xor, mask, value, lane_mask, width);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return unsigned(on_cpu::warp_call(on_cpu::WarpCall::ballot, mask, predicate != 0, 0, 32));
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) == mask;
}
inline unsigned __activemask() { return on_cpu::active_mask(); }

// One fiber runs at a time, so an atomic is a plain update, before which another thread may run.
template <typename Value>
inline Value atomicAdd(Value* address, decltype(Value() + Value()) value) {
  on_cpu::yield();
  const Value old = *address;
  *address = old + value;
  return old;
}
template <typename Value>
inline Value atomicMax(Value* address, decltype(Value() + Value()) value) {
  on_cpu::yield();
  const Value old = *address;
  *address = old < value ? value : old;
  return old;
}

#define CUPYNORM_LOAD(name)                 \
  template <typename Value>                 \
  inline Value name(const Value* address) { \
    return *address;                        \
  }
#define CUPYNORM_STORE(name)                      \
  template <typename Value>                       \
  inline void name(Value* address, Value value) { \
    *address = value;                             \
  }
CUPYNORM_LOAD(__ldg)
CUPYNORM_LOAD(__ldcs)
CUPYNORM_LOAD(__ldcg)
CUPYNORM_STORE(__stcs)
CUPYNORM_STORE(__stcg)
#undef CUPYNORM_LOAD
#undef CUPYNORM_STORE
