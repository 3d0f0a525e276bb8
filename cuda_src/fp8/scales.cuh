// scales.cuh -- fp8: a scale from an amax
//
// y_fp8 = saturate(y * scale), rounded once, to nearest even; y is y_fp8 * scale_inv. The bits are
// those of reference/fp8.py. A scale belongs to the whole tensor, to a row, or to some columns of a
// row:
//   given     one scale, which the caller gives; null means 1
//   tensor    one scale, from the amax that an earlier launch has found
//   row       one for each row, from the row's amax
//   block     one for each 128 columns of a row
//   mx        one for each 32 columns: scale_inv is a power of two in one byte (E8M0)
#pragma once
#include "amax.cuh"

enum class Scaling { given, tensor, row, block, mx };
// What a launch does: everything; or it finds the amaxes, for a second launch that writes. With a
// given scale, `write` does everything but record the amax.
enum class Step { all, amax, write };

constexpr int cols_of_scale(Scaling scaling) { return scaling == Scaling::mx ? 32 : 128; }

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

// The biased exponent of amax / largest, rounded up to a power of two; 255 for NaN. The quotient is
// a product with 1 / largest, rounded to float.
__device__ __forceinline__ unsigned e8m0_of(unsigned amax_bits, float reciprocal) {
  if (amax_bits >= infinity_bits) return amax_bits > infinity_bits ? 255 : 254;
  const float amax = __uint_as_float(amax_bits);
  const unsigned bits = __float_as_uint(amax * reciprocal);
  if (bits >= 2u << 23) return (bits >> 23) + ((bits & 0x7fffffu) != 0);
  // Near 2^-126 and below, where the compiler may flush: the bits of the product, rounded as a
  // denormal.
  const unsigned rounded =
      __double2uint_rn(static_cast<double>(amax) * static_cast<double>(reciprocal) * 0x1p149);
  return rounded <= 0x400000u ? 0 : rounded <= 0x800000u ? 1 : 2;
}

// What values are multiplied by. MXFP8: also the byte of scale_inv.
struct Multiplier {
  float factor = 1.0f;
  unsigned e8m0 = 0;
};

// 2^(127 - e8m0), NaN for 255. 2^-127, for 254, is no normal float.
__device__ __forceinline__ Multiplier multiplier_of_e8m0(unsigned e8m0) {
  const unsigned bits = e8m0 == 254 ? 1u << 22 : (254 - e8m0) << 23;
  return {__uint_as_float(e8m0 == 255 ? 0x7fc00000u : bits), e8m0};
}
// value * factor. The compiler would flush a small operand or product to zero.
__device__ __forceinline__ float unflushed_product(float value, float factor) {
  return __fmaf_ieee_rn(value, factor, -0.0f);
}
__device__ __forceinline__ double unflushed_product(double value, float factor) {
  return value * (__float_as_uint(factor) == 1u << 22 ? 0x1p-127 : static_cast<double>(factor));
}
