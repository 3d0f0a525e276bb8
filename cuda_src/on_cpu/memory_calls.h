// memory_calls.h -- atomics, and loads and stores with a cache policy, of the CPU build
#pragma once
#include "cuda_on_cpu_runtime.h"

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
