// scales.cuh -- fp8: a scale from an amax
//
// y_fp8 = saturate(y * scale), rounded once, to nearest even; y is y_fp8 * scale_inv. The bits are
// those of reference/fp8.py. A scale belongs to the whole tensor, to a row, or to some columns of a
// row:
//   given     one scale, which the caller gives; null means 1
//   tensor    one scale, from the amax that an earlier launch has found
//   row       one for each row, from the row's amax
//   block     one for each 128 columns of a row
#pragma once
#include "amax.cuh"

enum class Scaling { given, tensor, row, block };
// What a launch does: everything; or it finds the amaxes, for a second launch that writes. With a
// given scale, `write` does everything but record the amax.
enum class Step { all, amax, write };

constexpr int cols_of_block = 128;

// numerator / denominator, rounded to nearest, for a denominator from 1 to 2 and a numerator far
// from the ends of float's range. Without special cases a third of a division's instructions do.
__device__ __forceinline__ float divide_by_significand(float numerator, float denominator) {
  float reciprocal = __fdividef(1.0f, denominator);
  reciprocal = fmaf(reciprocal, fmaf(-denominator, reciprocal, 1.0f), reciprocal);
  float quotient = numerator * reciprocal;
  quotient = fmaf(fmaf(-denominator, quotient, numerator), reciprocal, quotient);
  return fmaf(fmaf(-denominator, quotient, numerator), reciprocal, quotient);
}
// The bits of numerator / the positive normal float of `bits`. The exponent may be out of float's
// range.
__device__ __forceinline__ int quotient_bits(float numerator, unsigned bits) {
  const unsigned exponent = (bits >> 23) - 127;
  const float quotient =
      divide_by_significand(numerator, __uint_as_float((bits & 0x7fffffu) | 0x3f800000u));
  return static_cast<int>(__float_as_uint(quotient) -
                          (exponent << 23));  // unsigned, which may wrap
}

// 1 / scale in float, for a scale that scale_of returns. Below 2^-126 by integers, because the
// compiler would flush it.
__device__ __forceinline__ float inverse_of(float scale) {
  const int bits = quotient_bits(1.0f, __float_as_uint(scale));
  if (bits >= 1 << 23) return __int_as_float(bits);
  return __uint_as_float(
      static_cast<unsigned>(__double2uint_rn(0x1p149 / static_cast<double>(scale))));
}
// The same of any scale, also one that is NaN.
__device__ __forceinline__ float inverse_of_any(float scale) {
  return scale >= 0x1p126f ? inverse_of(scale) : __fdiv_rn(1.0f, scale);
}

struct ScaleRule {
  long long smallest;      // bits of a float: a smaller amax counts as that
  long long power_of_two;  // 1: scales are rounded down to powers of two

  // largest / amax; 1 of an amax that is 0, infinite or NaN.
  __device__ __forceinline__ float scale_of(unsigned amax_bits, float largest) const {
    const unsigned bits =
        max(amax_bits, static_cast<unsigned>(smallest));  // they compare as floats do
    if (bits == 0 || bits >= infinity_bits) return 1.0f;
    const unsigned finite = infinity_bits - 1;
    // What is not normal is too small for a finite scale.
    const unsigned scale =
        bits < 1u << 23 ? finite : min(static_cast<unsigned>(quotient_bits(largest, bits)), finite);
    return __uint_as_float(power_of_two ? scale & infinity_bits : scale);
  }
};
