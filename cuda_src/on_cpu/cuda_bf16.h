// cuda_bf16.h -- the CPU build's bfloat16: the exact conversions of NVIDIA's header
//
// models  __nv_bfloat16 and __nv_bfloat162 as storage. Arithmetic is done in float, so there are no
//         operators
// here.
#pragma once
#include "cuda_on_cpu.h"

struct __nv_bfloat16 {
  unsigned short bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }

inline float __bfloat162float(__nv_bfloat16 value) {
  return __uint_as_float(unsigned(value.bits) << 16);
}

inline __nv_bfloat16 __double2bfloat16(double value) {
  return {on_cpu::round_to_16_bits<7>(value)};
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __double2bfloat16(value); }
inline __nv_bfloat16 __float2bfloat16(float value) { return __double2bfloat16(value); }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline __nv_bfloat162 __float22bfloat162_rn(float2 value) {
  return __floats2bfloat162_rn(value.x, value.y);
}
inline float2 __bfloat1622float2(__nv_bfloat162 value) {
  return {__bfloat162float(value.x), __bfloat162float(value.y)};
}
