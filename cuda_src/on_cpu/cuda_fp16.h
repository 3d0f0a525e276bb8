// cuda_fp16.h -- the CPU build's half precision: the exact conversions of NVIDIA's header
//
// models  __half and __half2 as storage. Arithmetic is done in float, so there are no operators
//         here.
#pragma once
#include "cuda_on_cpu.h"

struct __half {
  unsigned short bits;
};
struct alignas(4) __half2 {
  __half x, y;
};
using half = __half;
using half2 = __half2;

inline unsigned short __half_as_ushort(__half value) { return value.bits; }

inline float __half2float(__half value) {
  const unsigned sign = (value.bits & 0x8000u) << 16, exponent = value.bits >> 10 & 31u,
                 mantissa = value.bits & 0x3ffu;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
  if (exponent != 0) return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
  return __uint_as_float(sign | __float_as_uint(float(mantissa) * 0x1p-24f));
}

inline __half __double2half(double value) { return {on_cpu::round_to_16_bits<10>(value)}; }
inline __half __float2half_rn(float value) { return __double2half(value); }
inline __half __float2half(float value) { return __double2half(value); }
inline __half2 __float22half2_rn(float2 value) {
  return {__float2half_rn(value.x), __float2half_rn(value.y)};
}
inline float2 __half22float2(__half2 value) {
  return {__half2float(value.x), __half2float(value.y)};
}
