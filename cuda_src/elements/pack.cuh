// pack.cuh -- a pack is what one memory instruction moves: pack_size neighbouring elements of a row
//
// load_pack / store_pack    move 16, 8, 4, 2 or 1 bytes at once (32 and 64 bytes as several of 16)
//
// The caller guarantees that a pack's address is a multiple of min(16, its bytes). convert.cuh has
// its values. The types that depend on a pack's element type come first.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

// The type of the arithmetic: float for every element type but double.
template <class T>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};

// The wider type of arithmetic of two element types; void counts as none.
template <class A, class B>
struct WiderOf {
  using type = typename ComputeOf<A>::type;
};
template <class A>
struct WiderOf<A, double> {
  using type = double;
};

// A, or B if A is void.
template <class A, class B>
struct Otherwise {
  using type = A;
};
template <class B>
struct Otherwise<void, B> {
  using type = B;
};

// Stands for a value that an instance does not need.
struct Nothing {};

// A if `first`, else B.
template <bool first, class A, class B>
struct Either {
  using type = A;
};
template <class A, class B>
struct Either<false, A, B> {
  using type = B;
};

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
