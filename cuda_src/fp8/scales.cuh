// scales.cuh -- 8 bits: the largest magnitude of some values, and a scale from it
//
// y_fp8 = saturate(y * scale), rounded once, to nearest even; y is y_fp8 * scale_inv. The bits are
// those of reference/fp8.py. A scale belongs to the whole tensor, to a row, or to some columns of a
// row:
//   given     one scale, which the caller gives; null means 1
//   tensor    one scale, from the amax that an earlier launch has found
//   row       one for each row, from the row's amax
//   block     one for each 128 columns of a row; block64: for each 64
// An amax is kept as the bits of a float. They compare as magnitudes do, NaN is above infinity, and
// the compiler cannot flush a small value to zero. Atomics may find a maximum, in any order.
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

enum class Scaling { given, tensor, row, block, block64 };
// What a launch does: everything; or it finds the amaxes, for a second launch that writes. With a
// given scale, `write` does everything but record the amax.
enum class Step { all, amax, write };

template <Scaling scaling>
constexpr int cols_of_block = scaling == Scaling::block64 ? 64 : 128;

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
// The same with 0 below 2^-126, and without the registers that a division's special cases take.
__device__ __forceinline__ float quick_inverse_of(float scale) {
  const unsigned bits = __float_as_uint(scale), magnitude = bits & 0x7fffffffu;
  if (magnitude > infinity_bits) return scale;  // NaN
  const int inverse = quotient_bits(1.0f, magnitude);
  unsigned result = inverse < 1 << 23 || magnitude == infinity_bits ? 0u : inverse;
  if (magnitude < 1u << 23) result = infinity_bits;
  return __uint_as_float(result | (bits & 0x80000000u));
}

struct ScaleRule {
  long long smallest;      // bits of a float: a smaller amax counts as that
  long long upper;         // the same of a larger amax
  long long power_of_two;  // 1: scales are rounded down to powers of two
  long long divides;       // 1: a given scale is the inverse of what y is multiplied by

  // largest / amax; 1 of an amax that is below 2^-126, infinite or NaN.
  __device__ __forceinline__ float scale_of(unsigned amax_bits, float largest) const {
    if (amax_bits > infinity_bits) return 1.0f;
    // Bits compare as floats do.
    const unsigned bits =
        min(max(amax_bits, static_cast<unsigned>(smallest)), static_cast<unsigned>(upper));
    if (bits < 1u << 23 || bits >= infinity_bits) return 1.0f;
    const unsigned scale =
        min(static_cast<unsigned>(quotient_bits(largest, bits)), infinity_bits - 1);
    return __uint_as_float(power_of_two ? scale & infinity_bits : scale);
  }
  // given: the caller's, or null.
  __device__ __forceinline__ float given_scale(const float* given) const {
    if (given == nullptr) return 1.0f;
    return divides ? quick_inverse_of(*given) : *given;
  }
  __device__ __forceinline__ float given_scale_inv(const float* given) const {
    if (given == nullptr) return 1.0f;
    return divides ? *given : inverse_of_any(*given);
  }
};

// Where the scales of blocks are, in elements, if not in rows without gaps. packed: as bytes of
// exponents, those of four blocks of a row in one element.
struct ScalePlaces {
  long long parts;  // scales of a row
  long long row_stride;
  long long part_stride;
  long long packed;

  template <bool in_columns>
  __device__ __forceinline__ void save(float* scale_inv, long long row, long long part,
                                       float inverse) const {
    if constexpr (!in_columns) {
      scale_inv[row * parts + part] = inverse;
      return;
    }
    if (!packed) {
      scale_inv[row * row_stride + part * part_stride] = inverse;
      return;
    }
    auto* const four =
        reinterpret_cast<unsigned char*>(scale_inv + row * row_stride + part / 4 * part_stride);
    four[part % 4] = static_cast<unsigned char>(__float_as_uint(inverse) >> 23);
    if (part + 1 == parts)
      for (int at = part % 4 + 1; at < 4; ++at) four[at] = 0;
  }
};
