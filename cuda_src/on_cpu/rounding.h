// rounding.h -- double to a 16-bit float
#pragma once
#include "arithmetic.h"

namespace on_cpu {

// Rounds once, to nearest even: from float too, because float to double is exact. A NaN becomes
// 0x7fff, as in CUDA.
template <int mantissa_bits>
inline unsigned short round_to_16_bits(double value) {
  constexpr int exponent_bits = 15 - mantissa_bits;
  constexpr int least_exponent = 2 - (1 << (exponent_bits - 1));
  constexpr unsigned long long infinity = ((1ull << exponent_bits) - 1) << mantissa_bits;
  const auto bits = bits_as<unsigned long long>(value);
  const auto sign = (unsigned short)(bits >> 63 << 15);
  const unsigned long long magnitude = bits & ~(1ull << 63);
  if (value != value) return 0x7fff;

  const int exponent = int(magnitude >> 52) - 1023;
  const int above_least = exponent > least_exponent ? exponent - least_exponent : 0;
  const int shift =
      52 - mantissa_bits + (exponent < least_exponent ? least_exponent - exponent : 0);
  if (shift > 53) return sign;  // below half of the smallest subnormal, or zero
  const unsigned long long significand = (magnitude & ((1ull << 52) - 1)) | 1ull << 52;
  const unsigned long long kept = significand >> shift;
  const unsigned long long dropped = significand & ((1ull << shift) - 1),
                           half = 1ull << (shift - 1);
  // The leading one of a normal number adds the 1 by which its biased exponent exceeds above_least.
  unsigned long long rounded = ((unsigned long long)above_least << mantissa_bits) + kept;
  rounded += dropped > half || (dropped == half && (kept & 1));
  return sign | (unsigned short)(rounded < infinity ? rounded : infinity);
}

}  // namespace on_cpu
