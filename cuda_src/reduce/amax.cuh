// amax.cuh -- the largest magnitude of some values, as the bits of a float
//
// The bits of magnitudes compare as the magnitudes do, NaN is above infinity, and the compiler
// cannot flush a small value to zero. A maximum does not depend on the order of threads, so atomics
// may find it.
#pragma once
#include "reduce.cuh"

constexpr unsigned infinity_bits = 0x7f800000u;

// The bits of a positive value rounded to float. Float arithmetic would flush a value below 2^-126.
__device__ __forceinline__ unsigned float_bits(double value) {
  if (value < 0x1p-126) return __double2uint_rn(value * 0x1p149);
  return __float_as_uint(static_cast<float>(value));
}

// The largest magnitude of a thread's values. Positive values are compared as signed integers,
// negative ones as unsigned integers, so no value needs its sign cleared.
struct Extremes {
  int positive = 0;
  unsigned negative = 0;

  template <int pack_size>
  __device__ __forceinline__ void add_pack(const float (&values)[pack_size]) {
#pragma unroll
    for (int at = 0; at < pack_size; ++at) {
      positive = max(positive, __float_as_int(values[at]));
      negative = max(negative, __float_as_uint(values[at]));
    }
  }
  template <int pack_size>
  __device__ __forceinline__ void add_pack(const double (&values)[pack_size]) {
#pragma unroll
    for (int at = 0; at < pack_size; ++at) negative = max(negative, float_bits(fabs(values[at])));
  }
  __device__ __forceinline__ unsigned bits() const {
    return max(static_cast<unsigned>(positive), negative & 0x7fffffffu);
  }
};

// The largest magnitude as a value of reduce.cuh. at_once: whether a warp finds it in one
// instruction, which takes a few registers.
template <bool at_once>
struct LargestOf {
  static constexpr int size = 1;
  static constexpr bool ordered = false, is_maximum = at_once;
  float part[1];

  __device__ __forceinline__ unsigned bits() const { return __float_as_uint(part[0]); }
  __device__ __forceinline__ void add(unsigned magnitude) {
    part[0] = __uint_as_float(max(bits(), magnitude));
  }
  __device__ __forceinline__ void merge(const LargestOf& other) { add(other.bits()); }

  template <class Compute, int pack_size>
  __device__ __forceinline__ void add_pack(const Compute (&values)[pack_size]) {
    Extremes extremes;
    extremes.add_pack(values);
    add(extremes.bits());
  }
};
using Largest = LargestOf<true>;

// amax = max(amax, magnitude): called by all lanes of a warp, with the same bits. The read before
// saves most warps the atomic.
__device__ __forceinline__ void raise_amax(unsigned* amax, unsigned magnitude) {
  if (threadIdx.x % 32 == 0 && magnitude > __ldcg(amax)) atomicMax(amax, magnitude);
}
// The same, called by one thread.
__device__ __forceinline__ void raise_amax_alone(unsigned* amax, unsigned magnitude) {
  atomicMax(amax, magnitude);
}
