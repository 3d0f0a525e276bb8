// cuda_bf16.h -- the CPU build's bfloat16: the exact conversions of NVIDIA's header
//
// models  __nv_bfloat16 and __nv_bfloat162 as storage. Arithmetic is done in float, so there are no
//         operators here.
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

inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline float __bfloat162float(__nv_bfloat16 value) {
  return __uint_as_float(unsigned(value.bits) << 16);
}
inline __nv_bfloat16 __double2bfloat16(double value) {
  return {on_cpu::round_to_16_bits<7>(value)};
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __double2bfloat16(value); }
inline __nv_bfloat16 __float2bfloat16(float value) { return __double2bfloat16(value); }
inline __nv_bfloat162 __float22bfloat162_rn(float2 value) {
  return {__float2bfloat16_rn(value.x), __float2bfloat16_rn(value.y)};
}
