// cuda_fp8.h -- the CPU build's 8-bit floats: the exact, saturating conversions of NVIDIA's header
//
// models  __nv_fp8_e4m3 and __nv_fp8_e5m2 as storage.
#pragma once
#include "cuda_on_cpu.h"

typedef unsigned char __nv_fp8_storage_t;
typedef unsigned short __nv_fp8x2_storage_t;
struct __nv_fp8_e4m3 {
  __nv_fp8_storage_t __x;
};
struct __nv_fp8_e5m2 {
  __nv_fp8_storage_t __x;
};
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };

// Rounded once, to nearest even; from float too, because float to double is exact. A larger value
// becomes the largest finite one.
inline __nv_fp8_storage_t __nv_cvt_double_to_fp8(double value, __nv_saturation_t,
                                                 __nv_fp8_interpretation_t format) {
  const int mantissa_bits = format == __NV_E4M3 ? 3 : 2,
            least_exponent = format == __NV_E4M3 ? -6 : -14;
  const double largest = format == __NV_E4M3 ? 448.0 : 57344.0;
  if (value != value) return 0x7f;
  const double size = fabs(value) < largest ? fabs(value) : largest;
  const unsigned long long bits_of_value = on_cpu::bits_as<unsigned long long>(value);
  const int own_exponent = int(bits_of_value << 1 >> 53) - 1023;
  const int exponent = size < largest
                           ? (own_exponent > least_exponent ? own_exponent : least_exponent)
                           : (format == __NV_E4M3 ? 8 : 15);
  // Patterns of one sign are consecutive: a carry out of the mantissa is the next exponent.
  const int steps = int(rint(ldexp(size, mantissa_bits - exponent)));
  const int bits = steps + (exponent - least_exponent) * (1 << mantissa_bits);
  return __nv_fp8_storage_t(bits | (bits_of_value >> 63 << 7));
}
inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float value, __nv_saturation_t saturation,
                                                __nv_fp8_interpretation_t format) {
  return __nv_cvt_double_to_fp8(value, saturation, format);
}
inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 value, __nv_saturation_t saturation,
                                                     __nv_fp8_interpretation_t format) {
  return __nv_fp8x2_storage_t(__nv_cvt_float_to_fp8(value.x, saturation, format) |
                              __nv_cvt_float_to_fp8(value.y, saturation, format) << 8);
}
