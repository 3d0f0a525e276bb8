// float8.cuh -- 8 bits: formats, and conversion that saturates and rounds to nearest even
#pragma once
#include <cuda_fp8.h>

#include "convert.cuh"

template <class Float8>
struct FormatOf;
template <>
struct FormatOf<__nv_fp8_e4m3> {
  static constexpr __nv_fp8_interpretation_t format = __NV_E4M3;
  static constexpr float largest = 448.0f;
};
template <>
struct FormatOf<__nv_fp8_e5m2> {
  static constexpr __nv_fp8_interpretation_t format = __NV_E5M2;
  static constexpr float largest = 57344.0f;
};
template <>
struct FormatOf<signed char> {
  static constexpr float largest = 127.0f;
};

template <class Float8, int size>
__device__ __forceinline__ Pack<Float8, size> repack_fp8(const float (&values)[size]) {
  constexpr auto format = FormatOf<Float8>::format;
  using Word = typename Pack<Float8, size>::Word;
  Pack<Float8, size> pack{};
  if constexpr (size == 1) {
    pack.word[0] = __nv_cvt_float_to_fp8(values[0], __NV_SATFINITE, format);
  } else {
    unsigned short pairs[size / 2];
#pragma unroll
    for (int at = 0; at < size; at += 2) {
      pairs[at / 2] =
          __nv_cvt_float2_to_fp8x2(make_float2(values[at], values[at + 1]), __NV_SATFINITE, format);
    }
    if constexpr (size == 2) {
      pack.word[0] = static_cast<Word>(pairs[0]);
    } else {
#pragma unroll
      for (int at = 0; at < size / 4; ++at)
        pack.word[at] = reinterpret_bits<unsigned>(make_ushort2(pairs[2 * at], pairs[2 * at + 1]));
    }
  }
  return pack;
}
template <class Float8, int size>
__device__ __forceinline__ Pack<Float8, size> repack_fp8(const double (&values)[size]) {
  constexpr int word_bytes = sizeof(typename Pack<Float8, size>::Word);
  using Word = typename Pack<Float8, size>::Word;
  Pack<Float8, size> pack{};
#pragma unroll
  for (int at = 0; at < size; ++at) {
    const Word bits = __nv_cvt_double_to_fp8(values[at], __NV_SATFINITE, FormatOf<Float8>::format);
    pack.word[at / word_bytes] |= static_cast<Word>(bits << at % word_bytes * 8);
  }
  return pack;
}

// An integer of 32 bits, saturated; 0 of a NaN.
__device__ __forceinline__ int integer_of(float value) { return __float2int_rn(value); }
__device__ __forceinline__ int integer_of(double value) {
  return value == value ? __double2int_rn(value) : 0;
}
// Y: an 8-bit float, or signed char.
template <class Y, int size, class Compute>
__device__ __forceinline__ Pack<Y, size> repack_8_bits(const Compute (&values)[size]) {
  if constexpr (is_same<Y, signed char>) {
    using Word = typename Pack<Y, size>::Word;
    constexpr int word_bytes = sizeof(Word);
    Pack<Y, size> pack{};
#pragma unroll
    for (int at = 0; at < size; ++at) {
      const int rounded = min(max(integer_of(values[at]), -128), 127);
      pack.word[at / word_bytes] |=
          static_cast<Word>(static_cast<unsigned>(rounded & 0xff) << at % word_bytes * 8);
    }
    return pack;
  } else {
    return repack_fp8<Y>(values);
  }
}
