// result_image.cuh -- results in the shared memory of a bundle, and from there to global memory
#pragma once
#include "pack.cuh"

// Where results for `to` go in the image of `from`: at the same offset within 16 bytes as `to`, and
// not behind `from`. So a result never overwrites a row that is still to be read.
template <class T>
__device__ __forceinline__ T* result_image(const T* from, const T* to) {
  const unsigned long long from_offset = reinterpret_cast<unsigned long long>(from) % 16;
  const unsigned long long to_offset = reinterpret_cast<unsigned long long>(to) % 16;
  return const_cast<T*>(from) - (from_offset + 16 - to_offset) % 16 / sizeof(T);
}

// Called by the lanes of a part: writes `size` elements of an image to global memory.
template <int lanes, class T>
__device__ __forceinline__ void write_image(T* to, const T* image, int size) {
  constexpr int unit = 16 / sizeof(T);
  static_assert(lanes >= unit - 1, "the elements of an incomplete unit take one turn");
  const int lane = threadIdx.x % lanes;
  const int before = static_cast<int>(reinterpret_cast<unsigned long long>(to) % 16 / sizeof(T));
  const int head = min(size, (unit - before) % unit);
  const int num_units = (size - head) / unit, tail = head + num_units * unit;
  // Lanes that write at the same time write whole lines of 128 bytes.
  const int in_line = static_cast<int>(reinterpret_cast<unsigned long long>(to + head) / 16 % 8);
  for (int at = lane - in_line; at < num_units; at += lanes) {
    if (at >= 0) store_pack<unit>(to + head + at * unit, load_pack<unit>(image + head + at * unit));
  }
  if (lane < head) to[lane] = image[lane];
  if (lane < size - tail) to[tail + lane] = image[tail + lane];
}
