// fp8.cuh -- 8-bit floats: the conversion, scales from amaxes, and the store functor that writes them
//
// y_fp8 = saturate(y * scale), rounded once, to nearest even; y is y_fp8 * scale_inv. To the bit what reference/fp8.py gives
// for the y of arithmetic's type. A scale belongs to the whole tensor, to a row, or to `block` columns of one:
//   given     one scale, of which the caller knows; may be null: 1
//   tensor    one, from the amax that a launch before has found
//   row       of each row, from its own amax
//   block     of each 128 columns
//   mx        of each 32 columns: scale_inv a power of two, one byte (E8M0)
// A largest value is found by comparing, so no order of threads changes it, and as bits of a float it may be found by atomics.
#pragma once
#include <cuda_fp8.h>

#include "load_store.cuh"
#include "reduce.cuh"

enum class Scaling { given, tensor, row, block, mx };
// What a launch does: all at once; or first the amaxes, for a launch that writes.
enum class Step { all, amax, write };

constexpr int cols_of_scale(Scaling scaling) { return scaling == Scaling::mx ? 32 : 128; }

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

template <class Float8, int size>
__device__ __forceinline__ Pack<Float8, size> repack_fp8(const float (&values)[size]) {
  constexpr auto format = FormatOf<Float8>::format;
  using Word = typename Pack<Float8, size>::Word;
  Pack<Float8, size> pack{};
  if constexpr (size == 1) {
    pack.word[0] = __nv_cvt_float_to_fp8(values[0], __NV_SATFINITE, format);
  } else {
#pragma unroll
    for (int at = 0; at < size; at += 2) {
      const Word pair = __nv_cvt_float2_to_fp8x2(make_float2(values[at], values[at + 1]), __NV_SATFINITE, format);
      pack.word[at / 4] |= static_cast<Word>(pair << at % 4 * 8);
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

// |value|, and the larger of two such; NaN wins. As bits, which compare as floats do: the compiler flushes what is below 2^-126
// where floats are compared.
__device__ __forceinline__ float magnitude_of(float value) { return __uint_as_float(__float_as_uint(value) & 0x7fffffffu); }
__device__ __forceinline__ double magnitude_of(double value) { return fabs(value); }
__device__ __forceinline__ float larger(float held, float other) {
  const unsigned held_bits = __float_as_uint(held), other_bits = __float_as_uint(other);
  return __uint_as_float(other_bits > held_bits ? other_bits : held_bits);
}
__device__ __forceinline__ double larger(double held, double other) { return other > held || other != other ? other : held; }

template <class Compute>
struct Largest {
  static constexpr int size = 1;
  static constexpr bool ordered = false;
  Compute part[1];

  __device__ __forceinline__ void merge(const Largest& other) { add(other.part[0]); }
  __device__ __forceinline__ void add(Compute magnitude) { part[0] = larger(part[0], magnitude); }
};
template <int pack_size, class Compute>
__device__ __forceinline__ Compute largest_of(const Compute (&values)[pack_size]) {
  Largest<Compute> largest{};
#pragma unroll
  for (int at = 0; at < pack_size; ++at) largest.add(magnitude_of(values[at]));
  return largest.part[0];
}

constexpr unsigned infinity_bits = 0x7f800000u;

// The bits of a positive value as a float, also of one below 2^-126, where the compiler would flush results of floats.
__device__ __forceinline__ unsigned float_bits(float value) { return __float_as_uint(value); }
__device__ __forceinline__ unsigned float_bits(double value) {
  if (value < 0x1p-126) return __double2uint_rn(value * 0x1p149);
  return __float_as_uint(static_cast<float>(value));
}

// 1 / scale in float.
__device__ __forceinline__ float inverse_of(float scale) {
  return scale < 0x1p126f ? __fdiv_rn(1.0f, scale) : __uint_as_float(float_bits(1.0 / static_cast<double>(scale)));
}

struct ScaleRule {
  long long smallest;      // bits of a float: a smaller amax counts as that
  long long power_of_two;  // 1: scales are rounded down to powers of two

  // largest / amax; 1 of an amax that is 0, infinite or NaN.
  __device__ __forceinline__ float scale_of(unsigned amax_bits, float largest) const {
    const unsigned bits = amax_bits < smallest ? static_cast<unsigned>(smallest) : amax_bits;  // they compare as floats do
    if (bits == 0 || bits >= infinity_bits) return 1.0f;
    const unsigned scale = __float_as_uint(__fdiv_rn(largest, __uint_as_float(bits)));
    const unsigned finite = scale < infinity_bits ? scale : infinity_bits - 1;
    return __uint_as_float(power_of_two ? finite & infinity_bits : finite);
  }
};

// amax / largest as a power of two, rounded up: its biased exponent, 255 of NaN.
__device__ __forceinline__ unsigned e8m0_of(unsigned amax_bits, float reciprocal) {
  if (amax_bits > infinity_bits) return 255;
  if (amax_bits == infinity_bits) return 254;
  const float amax = __uint_as_float(amax_bits);
  const float product = amax * reciprocal;
  unsigned bits = __float_as_uint(product);
  if (product < 0x1p-125f) bits = float_bits(static_cast<double>(amax) * static_cast<double>(reciprocal));
  const unsigned exponent = bits >> 23, fraction = bits & 0x7fffffu;
  const unsigned found = exponent + (exponent == 0 ? fraction > 0x400000u : fraction > 0);
  return found < 254 ? found : 254;
}

// By all lanes of a warp, with the same bits. Most warps see that theirs is not the largest.
__device__ __forceinline__ void raise_amax(unsigned* amax, unsigned found) {
  if (threadIdx.x % 32 == 0 && found > __ldcg(amax)) atomicMax(amax, found);
}

// What values are multiplied by: two factors, since 2^-127 is no float that the compiler would not flush.
template <class Compute>
struct Multiplier {
  Compute first = 1;
  Compute second = 1;
};

template <class Compute>
__device__ __forceinline__ Multiplier<Compute> multiplier_of_e8m0(unsigned e8m0) {
  if (e8m0 == 255) return {static_cast<Compute>(__uint_as_float(0x7fc00000u)), Compute(1)};
  const int shift = 127 - static_cast<int>(e8m0), half = shift / 2;
  return {static_cast<Compute>(__uint_as_float(static_cast<unsigned>(127 + half) << 23)),
          static_cast<Compute>(__uint_as_float(static_cast<unsigned>(127 + shift - half) << 23))};
}

// As Store, in 8 bits. A launch of Step::amax writes no y; one of Step::write has the former's amaxes.
template <class Y, class Weight, class Bias, bool zero_centered, class Rounded, Scaling scaling, Step step>
struct QuantizeStore {
  static constexpr bool quantizes = true;
  static constexpr bool measures_rows = scaling == Scaling::row;
  static constexpr bool has_blocks = scaling == Scaling::block || scaling == Scaling::mx;
  static constexpr float largest_finite = FormatOf<Y>::largest;

  Y* y;
  long long y_stride;
  const Weight* weight;
  const Bias* bias;
  const float* scale;  // given: one, or null
  void* scale_inv;     // float, of mx unsigned char: one; or [num_rows, parts]
  unsigned* amax;      // bits of floats. given: one, raised to the largest, or null. Else those between two launches
  long long parts;     // scales of a row
  ScaleRule rule;

  // What a thread carries through a row.
  template <class Compute>
  struct OfRow {
    Multiplier<Compute> multiplier{};
    Largest<Compute> largest{};
  };
  template <int pack_size>
  using Kept = typename Store<Y, Weight, Bias, zero_centered, Rounded>::template Kept<pack_size>;

  template <int pack_size>
  __device__ __forceinline__ Kept<pack_size> keep(long long col) const {
    return {{weight, col}, {bias, col}};
  }

  template <class Compute>
  __device__ __forceinline__ OfRow<Compute> start_row() const {
    OfRow<Compute> of_row;
    if constexpr (scaling == Scaling::given) of_row.multiplier.first = scale == nullptr ? 1.0f : *scale;
    if constexpr (scaling == Scaling::tensor && step == Step::write) {
      of_row.multiplier.first = rule.scale_of(*amax, largest_finite);
    }
    return of_row;
  }
  // Of Scaling::row: what the threads that share the row have found; saves: whether this one is to write the scale.
  template <class Compute>
  __device__ __forceinline__ void finish_measuring(long long row, OfRow<Compute>& of_row, Compute largest, bool saves) const {
    const float found = rule.scale_of(float_bits(largest), largest_finite);
    of_row.multiplier.first = found;
    if (saves) static_cast<float*>(scale_inv)[row] = inverse_of(found);
  }
  // All lanes of a warp call it, each with the same number of rows.
  template <class Compute>
  __device__ __forceinline__ void finish_row(const OfRow<Compute>& of_row) const {
    constexpr bool raises = scaling == Scaling::given || (scaling == Scaling::tensor && step == Step::amax);
    if constexpr (raises) {
      if (amax == nullptr) return;
      const unsigned found = float_bits(warp_reduce<32>(of_row.largest).part[0]);
      raise_amax(amax, found);
    }
  }
  // By one thread of the grid.
  __device__ __forceinline__ void finish_tensor() const {
    if constexpr (scaling == Scaling::given) *static_cast<float*>(scale_inv) = inverse_of(scale == nullptr ? 1.0f : *scale);
    if constexpr (scaling == Scaling::tensor && step == Step::write) {
      *static_cast<float*>(scale_inv) = inverse_of(rule.scale_of(*amax, largest_finite));
    }
  }

  // y before its scale.
  template <int pack_size, class Compute>
  __device__ __forceinline__ void affine(const Compute (&values)[pack_size], const Kept<pack_size>& kept,
                                         Compute (&made)[pack_size]) const {
    Store<Y, Weight, Bias, zero_centered, Rounded>::affine(values, kept, made);
  }

  // All lanes of a warp call it together where Step::all has blocks: neighbouring lanes have neighbouring packs.
  template <int pack_size, class Compute>
  __device__ __forceinline__ void store(long long row, long long col, const Compute (&values)[pack_size],
                                        const Kept<pack_size>& kept, bool present, OfRow<Compute>& of_row) const {
    Compute made[pack_size];
    affine(values, kept, made);
    Multiplier<Compute> multiplier = of_row.multiplier;
    if constexpr (has_blocks) {
      constexpr int block = cols_of_scale(scaling);
      const long long part = row * parts + col / block;
      if constexpr (step == Step::write) {
        multiplier = multiplier_of<Compute>(present ? amax[part] : 0, part, present && col % block == 0);
      } else {
        Largest<Compute> largest{};
        if (present) largest.add(largest_of(made));
        if constexpr (step == Step::amax) {
          if (present) atomicMax(amax + part, float_bits(largest.part[0]));
        } else {
          largest = warp_reduce<block / pack_size>(largest);
          multiplier = multiplier_of<Compute>(float_bits(largest.part[0]), part, present && col % block == 0);
        }
      }
    } else if constexpr (step == Step::amax || scaling == Scaling::given) {
      if (present) of_row.largest.add(largest_of(made));
    }
    if constexpr (step != Step::amax) {
#pragma unroll
      for (int at = 0; at < pack_size; ++at) made[at] = made[at] * multiplier.first * multiplier.second;
      if (present) store_pack<pack_size>(y + row * y_stride + col, repack_fp8<Y>(made));
    }
  }

 private:
  // Of a block; saves: whether this thread is to write its scale.
  template <class Compute>
  __device__ __forceinline__ Multiplier<Compute> multiplier_of(unsigned amax_bits, long long part, bool saves) const {
    if constexpr (scaling == Scaling::mx) {
      const unsigned found = e8m0_of(amax_bits, 1.0f / largest_finite);
      if (saves) static_cast<unsigned char*>(scale_inv)[part] = static_cast<unsigned char>(found);
      return multiplier_of_e8m0<Compute>(found);
    } else {
      const float found = rule.scale_of(amax_bits, largest_finite);
      if (saves) static_cast<float*>(scale_inv)[part] = inverse_of(found);
      return {static_cast<Compute>(found), Compute(1)};
    }
  }
};
