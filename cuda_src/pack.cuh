// pack.cuh -- a pack is what one memory instruction moves: pack_size neighbouring elements of a row
//
// load_pack / store_pack   16, 8, 4, 2 or 1 bytes at once (32 and 64 bytes as several of 16)
// convert<To>(value)       one rounding, to nearest even; unpack / repack do it for a whole pack
// The caller guarantees that a pack's address is a multiple of min(16, its bytes).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

// float does the arithmetic of every type but double.
template <class T>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};

template <class T, int size>
struct alignas(sizeof(T) * size < 16 ? sizeof(T) * size : 16) Pack {
  T value[size];
};

// The register type that moves `bytes` bytes. A struct copy would do, but only these are sure to be one instruction.
template <int bytes>
struct Word {
  using type = uint4;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<4> {
  using type = unsigned int;
};
template <>
struct Word<2> {
  using type = unsigned short;
};
template <>
struct Word<1> {
  using type = unsigned char;
};

template <int size, class T>
__device__ __forceinline__ Pack<T, size> load_pack(const T* address) {
  using Moved = typename Word<sizeof(T) * size>::type;
  constexpr int num_words = sizeof(T) * size / sizeof(Moved);
  union Both {
    Moved word[num_words];
    Pack<T, size> pack;
    __device__ Both() {}
  } both;
#pragma unroll
  for (int word = 0; word < num_words; ++word) both.word[word] = reinterpret_cast<const Moved*>(address)[word];
  return both.pack;
}

template <int size, class T>
__device__ __forceinline__ void store_pack(T* address, const Pack<T, size>& pack) {
  using Moved = typename Word<sizeof(T) * size>::type;
  constexpr int num_words = sizeof(T) * size / sizeof(Moved);
  union Both {
    Moved word[num_words];
    Pack<T, size> pack;
    __device__ Both() {}
  } both;
  both.pack = pack;
#pragma unroll
  for (int word = 0; word < num_words; ++word) reinterpret_cast<Moved*>(address)[word] = both.word[word];
}

// The same pack, but the compiler cannot tell: it then unpacks it again in a later pass instead of keeping the unpacked
// values alive, which takes twice the registers for 16-bit types and spills.
template <class T, int size>
__device__ __forceinline__ void forget_unpacked(Pack<T, size>& pack) {
  if constexpr (sizeof(T) * size >= 4) {
    union Both {
      unsigned int word[sizeof(T) * size / 4];
      Pack<T, size> pack;
      __device__ Both() {}
    } both;
    both.pack = pack;
#pragma unroll
    for (unsigned int& word : both.word) asm("" : "+r"(word));
    pack = both.pack;
  }
}

template <class To, class From>
__device__ __forceinline__ To convert(From value) {
  if constexpr (is_same<To, From>) {
    return value;
  } else if constexpr (is_same<From, __half>) {
    return static_cast<To>(__half2float(value));
  } else if constexpr (is_same<From, __nv_bfloat16>) {
    return static_cast<To>(__bfloat162float(value));
  } else if constexpr (is_same<To, __half>) {
    if constexpr (is_same<From, double>) return __double2half(value);
    return __float2half_rn(static_cast<float>(value));
  } else if constexpr (is_same<To, __nv_bfloat16>) {
    if constexpr (is_same<From, double>) return __double2bfloat16(value);
    return __float2bfloat16_rn(static_cast<float>(value));
  } else {
    return static_cast<To>(value);
  }
}

template <int size, class To, class From>
__device__ __forceinline__ void unpack(const Pack<From, size>& pack, To (&values)[size]) {
#pragma unroll
  for (int at = 0; at < size; ++at) values[at] = convert<To>(pack.value[at]);
}

template <class To, int size, class From>
__device__ __forceinline__ Pack<To, size> repack(const From (&values)[size]) {
  Pack<To, size> pack;
  if constexpr (is_same<To, __nv_bfloat16> && is_same<From, float> && size % 2 == 0) {
    // One instruction converts two.
#pragma unroll
    for (int at = 0; at < size; at += 2) {
      const __nv_bfloat162 pair = __float22bfloat162_rn(make_float2(values[at], values[at + 1]));
      pack.value[at] = pair.x;
      pack.value[at + 1] = pair.y;
    }
  } else if constexpr (is_same<To, __half> && is_same<From, float> && size % 2 == 0) {
#pragma unroll
    for (int at = 0; at < size; at += 2) {
      const __half2 pair = __float22half2_rn(make_float2(values[at], values[at + 1]));
      pack.value[at] = pair.x;
      pack.value[at + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int at = 0; at < size; ++at) pack.value[at] = convert<To>(values[at]);
  }
  return pack;
}
