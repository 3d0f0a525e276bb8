// convert.cuh -- packs in the compute type, and back
//
// unpack / repack    convert to the compute type, and back with one rounding, to nearest even
// load_element       one element in the compute type
#pragma once
#include "pack.cuh"

// The same bits as another type.
template <class To, class From>
__device__ __forceinline__ To reinterpret_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  union Both {
    From from;
    To to;
    __device__ Both() {}
  } both;
  both.from = from;
  return both.to;
}

template <int size, class To, class From>
__device__ __forceinline__ void unpack(const Pack<From, size>& pack, To (&values)[size]) {
  if constexpr (is_same<From, __nv_bfloat16> && size > 1) {
    // A bfloat16 is the upper half of a float: one instruction each.
#pragma unroll
    for (int at = 0; at < size; at += 2) {
      values[at] = static_cast<To>(__uint_as_float(pack.word[at / 2] << 16));
      values[at + 1] = static_cast<To>(__uint_as_float(pack.word[at / 2] & 0xffff0000u));
    }
  } else if constexpr (is_same<From, __nv_bfloat16>) {
    values[0] = static_cast<To>(__uint_as_float(static_cast<unsigned int>(pack.word[0]) << 16));
  } else if constexpr (is_same<From, __half> && size > 1) {
#pragma unroll
    for (int at = 0; at < size; at += 2) {
      const float2 pair = __half22float2(reinterpret_bits<__half2>(pack.word[at / 2]));
      values[at] = static_cast<To>(pair.x);
      values[at + 1] = static_cast<To>(pair.y);
    }
  } else if constexpr (is_same<From, __half>) {
    values[0] = static_cast<To>(__half2float(reinterpret_bits<__half>(pack.word[0])));
  } else if constexpr (is_same<From, float>) {
#pragma unroll
    for (int at = 0; at < size; ++at) values[at] = static_cast<To>(__uint_as_float(pack.word[at]));
  } else {
    static_assert(is_same<From, double>, "a pack holds __half, __nv_bfloat16, float or double");
#pragma unroll
    for (int at = 0; at < size; ++at) {
      values[at] = static_cast<To>(
          reinterpret_bits<double>(make_uint2(pack.word[2 * at], pack.word[2 * at + 1])));
    }
  }
}

template <class To, class T>
__device__ __forceinline__ To load_element(const T* address) {
  To value[1];
  unpack(load_pack<1>(address), value);
  return value[0];
}

template <class To, int size, class From>
__device__ __forceinline__ Pack<To, size> repack(const From (&values)[size]) {
  Pack<To, size> pack;
  if constexpr (is_same<To, double>) {
#pragma unroll
    for (int at = 0; at < size; ++at) {
      const uint2 words = reinterpret_bits<uint2>(static_cast<double>(values[at]));
      pack.word[2 * at] = words.x;
      pack.word[2 * at + 1] = words.y;
    }
  } else if constexpr (is_same<To, float>) {
#pragma unroll
    for (int at = 0; at < size; ++at)
      pack.word[at] = __float_as_uint(static_cast<float>(values[at]));
  } else if constexpr (size > 1 && is_same<From, float>) {
    // One instruction converts two.
#pragma unroll
    for (int at = 0; at < size; at += 2) {
      const float2 pair = make_float2(values[at], values[at + 1]);
      if constexpr (is_same<To, __half>) {
        pack.word[at / 2] = reinterpret_bits<unsigned int>(__float22half2_rn(pair));
      } else {
        pack.word[at / 2] = reinterpret_bits<unsigned int>(__float22bfloat162_rn(pair));
      }
    }
  } else {
    // Single elements, and double, which must not be rounded to float first.
    unsigned short bits[size];
#pragma unroll
    for (int at = 0; at < size; ++at) {
      if constexpr (is_same<To, __half> && is_same<From, double>) {
        bits[at] = __half_as_ushort(__double2half(values[at]));
      } else if constexpr (is_same<To, __half>) {
        bits[at] = __half_as_ushort(__float2half_rn(values[at]));
      } else if constexpr (is_same<From, double>) {
        bits[at] = __bfloat16_as_ushort(__double2bfloat16(values[at]));
      } else {
        bits[at] = __bfloat16_as_ushort(__float2bfloat16_rn(values[at]));
      }
    }
    if constexpr (size == 1) {
      pack.word[0] = bits[0];
    } else {
#pragma unroll
      for (int at = 0; at < size; at += 2)
        pack.word[at / 2] = bits[at] | static_cast<unsigned int>(bits[at + 1]) << 16;
    }
  }
  return pack;
}
