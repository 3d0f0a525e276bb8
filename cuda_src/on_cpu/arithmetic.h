// arithmetic.h -- CUDA's functions of numbers and of their bits
#pragma once

namespace on_cpu {

template <typename To, typename From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

}  // namespace on_cpu

#define CUPYNORM_MATH_1(name)      \
  extern "C" float name##f(float); \
  extern "C" double name(double);  \
  inline float name(float x) { return name##f(x); }
#define CUPYNORM_MATH_2(name)             \
  extern "C" float name##f(float, float); \
  extern "C" double name(double, double); \
  inline float name(float x, float y) { return name##f(x, y); }
CUPYNORM_MATH_1(sqrt)
CUPYNORM_MATH_1(fabs)
CUPYNORM_MATH_1(exp)
CUPYNORM_MATH_1(exp2)
CUPYNORM_MATH_1(log)
CUPYNORM_MATH_1(log2)
CUPYNORM_MATH_1(tanh)
CUPYNORM_MATH_1(erf)
CUPYNORM_MATH_1(floor)
CUPYNORM_MATH_1(ceil)
CUPYNORM_MATH_1(trunc)
CUPYNORM_MATH_1(rint)
CUPYNORM_MATH_1(round)
CUPYNORM_MATH_2(fmin)
CUPYNORM_MATH_2(fmax)
CUPYNORM_MATH_2(fmod)
CUPYNORM_MATH_2(pow)
CUPYNORM_MATH_2(copysign)
#undef CUPYNORM_MATH_1
#undef CUPYNORM_MATH_2
extern "C" float fmaf(float, float, float);
extern "C" double fma(double, double, double);
inline float fma(float x, float y, float z) { return fmaf(x, y, z); }
extern "C" float ldexpf(float, int);
extern "C" double ldexp(double, int);

extern "C" int abs(int);
inline long long abs(long long x) { return x < 0 ? -x : x; }
inline float abs(float x) { return fabsf(x); }
inline double abs(double x) { return fabs(x); }

inline bool isnan(float x) { return x != x; }
inline bool isnan(double x) { return x != x; }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isinf(double x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool isfinite(double x) { return __builtin_isfinite(x); }

// The type of mixed arguments is that of their sum and a NaN loses, both as in CUDA.
template <typename Left, typename Right>
inline constexpr auto min(Left left, Right right) {
  const decltype(left + right) x = left, y = right;
  return x != x || y < x ? y : x;
}
template <typename Left, typename Right>
inline constexpr auto max(Left left, Right right) {
  const decltype(left + right) x = left, y = right;
  return x != x || x < y ? y : x;
}

inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frsqrt_rn(float x) { return float(1.0 / sqrt(double(x))); }
inline double __dmul_rn(double x, double y) { return x * y; }
inline float rsqrtf(float x) { return __frsqrt_rn(x); }
inline float rsqrt(float x) { return __frsqrt_rn(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

inline float __uint_as_float(unsigned x) { return on_cpu::bits_as<float>(x); }
inline unsigned __float_as_uint(float x) { return on_cpu::bits_as<unsigned>(x); }
inline float __int_as_float(int x) { return on_cpu::bits_as<float>(x); }
inline int __float_as_int(float x) { return on_cpu::bits_as<int>(x); }
// Saturates, as the GPU does. NaN is 0 in float, and undefined here in double.
inline int __double2int_rn(double x) {
  return int(fmin(fmax(rint(x), -2147483648.0), 2147483647.0));
}
inline int __float2int_rn(float x) { return x == x ? __double2int_rn(x) : 0; }
inline unsigned __double2uint_rn(double x) { return unsigned(rint(x)); }

inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  unsigned picked = 0;
  for (int at = 0; at < 4; ++at) {
    const unsigned byte = selector >> 4 * at & 7u;
    picked |= ((byte < 4 ? x >> 8 * byte : y >> 8 * (byte - 4)) & 0xffu) << 8 * at;
  }
  return picked;
}

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

#define CUPYNORM_VECTOR_TYPES(type, name)                          \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; };         \
  struct alignas(16) name##4 { type x, y, z, w; };                 \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; } \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
CUPYNORM_VECTOR_TYPES(int, int)
CUPYNORM_VECTOR_TYPES(unsigned, uint)
CUPYNORM_VECTOR_TYPES(float, float)
CUPYNORM_VECTOR_TYPES(double, double)
#undef CUPYNORM_VECTOR_TYPES
struct alignas(4) ushort2 {
  unsigned short x, y;
};
inline ushort2 make_ushort2(unsigned short x, unsigned short y) { return {x, y}; }
