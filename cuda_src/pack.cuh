// pack.cuh -- a pack is what one memory instruction moves: pack_size neighbouring elements of a row
//
// load_pack / store_pack    move 16, 8, 4, 2 or 1 bytes at once (32 and 64 bytes as several of 16)
// unpack / repack           convert to the compute type, and back with one rounding, to nearest
// even The caller guarantees that a pack's address is a multiple of min(16, its bytes).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "types.cuh"

// The word that a pack's bytes are kept in: 32 bits, or fewer for a pack of one or two bytes.
template <int bytes>
struct WordOf {
  using type = unsigned int;
};
template <>
struct WordOf<2> {
  using type = unsigned short;
};
template <>
struct WordOf<1> {
  using type = unsigned char;
};

template <class T, int size>
struct alignas(sizeof(T) * size < 16 ? sizeof(T) * size : 16) Pack {
  using Word = typename WordOf<sizeof(T) * size>::type;
  static constexpr int num_words = sizeof(T) * size / sizeof(Word);
  Word word[num_words];
};

template <int size, class T>
__device__ __forceinline__ Pack<T, size> load_pack(const T* address) {
  constexpr int bytes = sizeof(T) * size;
  Pack<T, size> pack;
  if constexpr (bytes >= 16) {
#pragma unroll
    for (int at = 0; at < bytes / 16; ++at) {
      const uint4 moved = reinterpret_cast<const uint4*>(address)[at];
      pack.word[4 * at] = moved.x;
      pack.word[4 * at + 1] = moved.y;
      pack.word[4 * at + 2] = moved.z;
      pack.word[4 * at + 3] = moved.w;
    }
  } else if constexpr (bytes == 8) {
    const uint2 moved = *reinterpret_cast<const uint2*>(address);
    pack.word[0] = moved.x;
    pack.word[1] = moved.y;
  } else {
    pack.word[0] = *reinterpret_cast<const typename Pack<T, size>::Word*>(address);
  }
  return pack;
}

template <int size, class T>
__device__ __forceinline__ void store_pack(T* address, const Pack<T, size>& pack) {
  constexpr int bytes = sizeof(T) * size;
  if constexpr (bytes >= 16) {
#pragma unroll
    for (int at = 0; at < bytes / 16; ++at) {
      reinterpret_cast<uint4*>(address)[at] = make_uint4(
          pack.word[4 * at], pack.word[4 * at + 1], pack.word[4 * at + 2], pack.word[4 * at + 3]);
    }
  } else if constexpr (bytes == 8) {
    *reinterpret_cast<uint2*>(address) = make_uint2(pack.word[0], pack.word[1]);
  } else {
    *reinterpret_cast<typename Pack<T, size>::Word*>(address) = pack.word[0];
  }
}

// Two packs as one of twice the size.
template <int size, class T>
__device__ __forceinline__ Pack<T, 2 * size> join(const Pack<T, size>& first,
                                                  const Pack<T, size>& second) {
  Pack<T, 2 * size> both;
  if constexpr (sizeof(T) * size < 4) {
    both.word[0] = first.word[0] | static_cast<unsigned int>(second.word[0]) << 16;
  } else {
    constexpr int num_words = sizeof(T) * size / 4;
#pragma unroll
    for (int at = 0; at < num_words; ++at) {
      both.word[at] = first.word[at];
      both.word[num_words + at] = second.word[at];
    }
  }
  return both;
}

// Hides from the compiler that the pack is unchanged, so that a later pass unpacks it again.
// Otherwise the compiler keeps the unpacked values: twice the registers for 16-bit types, and it
// spills.
template <class T, int size>
__device__ __forceinline__ void forget_unpacked(Pack<T, size>& pack) {
  if constexpr (sizeof(T) * size >= 4) {
#pragma unroll
    for (unsigned int& word : pack.word) asm("" : "+r"(word));
  }
}

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
