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
// What a launch does: all at once; or the amaxes alone, for a launch that then writes. Of a given scale `write` does all but
// record the amax.
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
    unsigned short pairs[size / 2];
#pragma unroll
    for (int at = 0; at < size; at += 2) {
      pairs[at / 2] = __nv_cvt_float2_to_fp8x2(make_float2(values[at], values[at + 1]), __NV_SATFINITE, format);
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

constexpr unsigned infinity_bits = 0x7f800000u;

// The bits of a positive value as a float, also of one below 2^-126, where the compiler would flush results of floats.
__device__ __forceinline__ unsigned float_bits(double value) {
  if (value < 0x1p-126) return __double2uint_rn(value * 0x1p149);
  return __float_as_uint(static_cast<float>(value));
}

// The largest magnitude of a thread's values, as the bits of a float: they compare as magnitudes do, NaN is beyond infinity,
// and what the compiler would flush stays. Of the positive values the largest as signed numbers, of the negative ones as
// unsigned numbers: no sign to clear in each.
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
  __device__ __forceinline__ unsigned bits() const { return max(static_cast<unsigned>(positive), negative & 0x7fffffffu); }
};

// The same as part of a reduction, whose values are floats. is_maximum: whether a warp finds it in one instruction, which takes
// a few registers.
template <bool at_once>
struct LargestOf {
  static constexpr int size = 1;
  static constexpr bool ordered = false, is_maximum = at_once;
  float part[1];

  __device__ __forceinline__ unsigned bits() const { return __float_as_uint(part[0]); }
  __device__ __forceinline__ void add(unsigned magnitude) { part[0] = __uint_as_float(max(bits(), magnitude)); }
  __device__ __forceinline__ void merge(const LargestOf& other) { add(other.bits()); }

  template <class Compute, int pack_size>
  __device__ __forceinline__ void add_pack(const Compute (&values)[pack_size]) {
    Extremes extremes;
    extremes.add_pack(values);
    add(extremes.bits());
  }
};
using Largest = LargestOf<true>;

// numerator / denominator, rounded to nearest, of a denominator from 1 to 2 and a numerator far from float's ends: no case is
// special, so it takes a third of the instructions of the division that knows them all.
__device__ __forceinline__ float divide_by_significand(float numerator, float denominator) {
  float reciprocal = __fdividef(1.0f, denominator);
  reciprocal = fmaf(reciprocal, fmaf(-denominator, reciprocal, 1.0f), reciprocal);
  float quotient = numerator * reciprocal;
  quotient = fmaf(fmaf(-denominator, quotient, numerator), reciprocal, quotient);
  return fmaf(fmaf(-denominator, quotient, numerator), reciprocal, quotient);
}
// numerator / the positive normal float of these bits, as bits, whose exponent may be beyond a float's at either end.
__device__ __forceinline__ int quotient_bits(float numerator, unsigned bits) {
  const unsigned exponent = (bits >> 23) - 127;
  const float quotient = divide_by_significand(numerator, __uint_as_float((bits & 0x7fffffu) | 0x3f800000u));
  return static_cast<int>(__float_as_uint(quotient) - (exponent << 23));  // unsigned, which may wrap
}

// 1 / scale in float, of a scale that scale_of gives; below 2^-126 by integers, since the compiler would flush it.
__device__ __forceinline__ float inverse_of(float scale) {
  const int bits = quotient_bits(1.0f, __float_as_uint(scale));
  if (bits >= 1 << 23) return __int_as_float(bits);
  return __uint_as_float(static_cast<unsigned>(__double2uint_rn(0x1p149 / static_cast<double>(scale))));
}
// The same of any scale, also one that is NaN.
__device__ __forceinline__ float inverse_of_any(float scale) {
  return scale >= 0x1p126f ? inverse_of(scale) : __fdiv_rn(1.0f, scale);
}

struct ScaleRule {
  long long smallest;      // bits of a float: a smaller amax counts as that
  long long power_of_two;  // 1: scales are rounded down to powers of two

  // largest / amax; 1 of an amax that is 0, infinite or NaN.
  __device__ __forceinline__ float scale_of(unsigned amax_bits, float largest) const {
    const unsigned bits = max(amax_bits, static_cast<unsigned>(smallest));  // they compare as floats do
    if (bits == 0 || bits >= infinity_bits) return 1.0f;
    const unsigned finite = infinity_bits - 1;
    // What is not normal is too small for a finite scale.
    const unsigned scale = bits < 1u << 23 ? finite : min(static_cast<unsigned>(quotient_bits(largest, bits)), finite);
    return __uint_as_float(power_of_two ? scale & infinity_bits : scale);
  }
};

// amax / largest as a power of two, rounded up: its biased exponent, 255 of NaN. The quotient is a product with 1 / largest,
// which is rounded as a float is.
__device__ __forceinline__ unsigned e8m0_of(unsigned amax_bits, float reciprocal) {
  if (amax_bits >= infinity_bits) return amax_bits > infinity_bits ? 255 : 254;
  const float amax = __uint_as_float(amax_bits);
  const unsigned bits = __float_as_uint(amax * reciprocal);
  if (bits >= 2u << 23) return (bits >> 23) + ((bits & 0x7fffffu) != 0);
  // Near 2^-126 and below, where the compiler may flush: the bits of the product that is rounded as a denormal is.
  const unsigned rounded = __double2uint_rn(static_cast<double>(amax) * static_cast<double>(reciprocal) * 0x1p149);
  return rounded <= 0x400000u ? 0 : rounded <= 0x800000u ? 1 : 2;
}

// By all lanes of a warp, with the same bits. Most warps see that theirs is not the largest.
__device__ __forceinline__ void raise_amax(unsigned* amax, unsigned found) {
  if (threadIdx.x % 32 == 0 && found > __ldcg(amax)) atomicMax(amax, found);
}

// What values are multiplied by; of MXFP8 with the byte that says so.
struct Multiplier {
  float factor = 1.0f;
  unsigned e8m0 = 0;
};

// 2^(127 - e8m0), NaN for 255. 2^-127, for 254, is no normal float.
__device__ __forceinline__ Multiplier multiplier_of_e8m0(unsigned e8m0) {
  const unsigned bits = e8m0 == 254 ? 1u << 22 : (254 - e8m0) << 23;
  return {__uint_as_float(e8m0 == 255 ? 0x7fc00000u : bits), e8m0};
}
// value * factor, with nothing flushed of either, as the compiler would.
__device__ __forceinline__ float times(float value, float factor) { return __fmaf_ieee_rn(value, factor, -0.0f); }
__device__ __forceinline__ double times(double value, float factor) {
  return value * (__float_as_uint(factor) == 1u << 22 ? 0x1p-127 : static_cast<double>(factor));
}

// Some largest magnitudes, each over `lanes` neighbouring lanes, which share them out: every exchange halves what a lane still
// has to compare, until it knows `own` of them from first_own() on, whose scales it finds for all. A number of num_values or
// more is of none.
template <int lanes, int num_values>
struct SharedLargest {
  static constexpr int places = power_of_two_from(num_values);
  static constexpr int own = places > lanes ? places / lanes : 1;
  static constexpr int holders = places < lanes ? lanes / places : 1;  // neighbouring lanes that know the same

  Largest values[num_values]{};

  __device__ __forceinline__ static int first_own() { return static_cast<int>(threadIdx.x % lanes) / holders * own; }
  __device__ __forceinline__ static bool is_first_holder() { return threadIdx.x % holders == 0; }

  // All lanes of a warp call it, and told() too.
  __device__ __forceinline__ void share_out() { share_out_with<lanes / 2, num_values>(); }
  // Of what lanes have found of their own values, that of value `index`.
  __device__ __forceinline__ static float told(const float (&found)[own], int index) {
    return __shfl_sync(0xffffffffu, found[index % own], index / own * holders, lanes);
  }

 private:
  // With the lane so far away, and nearer ones. left: values that a lane has not given away.
  template <int distance, int left>
  __device__ __forceinline__ void share_out_with() {
    if constexpr (distance > 0) {
      constexpr int half = places * distance / lanes, compared = half > 0 ? half : 1;
      const bool upper = (threadIdx.x & distance) != 0;
#pragma unroll
      for (int at = 0; at < compared; ++at) {
        const bool halves = half > 0 && at + half < left;
        const unsigned mine = values[at].bits(), others = halves ? values[at + half].bits() : mine;
        values[at] = {};
        values[at].add(upper ? others : mine);
        values[at].add(__shfl_xor_sync(0xffffffffu, upper ? mine : others, distance));
      }
      share_out_with<distance / 2, (left < compared ? left : compared)>();
    }
  }
};

// The scales of a row while they are sought in it, and what a pack is multiplied by when they are known. Those of blocks belong
// to neighbouring lanes, and to packs_per_scale packs of each.
template <Scaling scaling, class Row>
struct ScalesOfRow {
  static constexpr int packs_per_block = cols_of_scale(scaling) / Row::pack_size;
  static constexpr int lanes = packs_per_block < Row::threads_per_row ? packs_per_block : Row::threads_per_row;
  static constexpr int packs_per_scale = packs_per_block / lanes;
  static constexpr int num_scales = (Row::most_made + packs_per_scale - 1) / packs_per_scale;
  static_assert(lanes <= 32 && packs_per_block % lanes == 0 && Row::threads_per_row % lanes == 0,
                "a warp has all of a block, and nothing else beside it in one scale");
  using Blocks = SharedLargest<lanes, num_scales>;

  Blocks largest{};
  float factors[Blocks::own];
  float factor;

  template <class Compute>
  __device__ __forceinline__ void measure(int pack, const Compute (&made)[Row::pack_size], bool in_row) {
    if (in_row) largest.values[pack / packs_per_scale].add_pack(made);
  }
  // One pack after the other.
  __device__ __forceinline__ float of_pack(int pack) {
    if (pack % packs_per_scale == 0) factor = Blocks::told(factors, pack / packs_per_scale);
    return factor;
  }
};
template <class Row>
struct ScalesOfRow<Scaling::row, Row> {
  Extremes extremes;  // of all packs, if there are registers for both
  Largest largest_of_packs{};
  float factor;

  template <class Compute>
  __device__ __forceinline__ void measure(int, const Compute (&made)[Row::pack_size], bool in_row) {
    if constexpr (Row::has_spare_registers) {
      if (in_row) extremes.add_pack(made);
    } else {
      if (in_row) largest_of_packs.add_pack(made);
    }
  }
  __device__ __forceinline__ Largest largest() const {
    Largest largest = largest_of_packs;
    largest.add(extremes.bits());
    return largest;
  }
  __device__ __forceinline__ float of_pack(int) const { return factor; }
};

template <class T>
constexpr int bytes_of = sizeof(T);
template <>
constexpr int bytes_of<void> = 0;

// As Store, in 8 bits. A launch of Step::amax writes no y; one of Step::write has the former's amaxes.
template <class Y, class Weight, class Bias, bool zero_centered, class Rounded, Scaling scaling, Step step>
struct QuantizeStore {
  static constexpr bool quantizes = true;
  static constexpr bool is_mx = scaling == Scaling::mx;
  static constexpr bool has_blocks = scaling == Scaling::block || is_mx;
  // Whether a row's own scales are found before any of it is written.
  static constexpr bool measures_rows = scaling == Scaling::row || (has_blocks && step == Step::all);
  static constexpr bool has_wide_parameters = bytes_of<Weight> > 2 || bytes_of<Bias> > 2;
  static constexpr bool raises =
      (scaling == Scaling::given && step == Step::all) || (scaling == Scaling::tensor && step == Step::amax);
  static constexpr float largest_finite = FormatOf<Y>::largest;

  Y* y;
  long long y_stride;
  const Weight* weight;
  const Bias* bias;
  const float* scale;  // given: one, or null
  void* scale_inv;     // float, of mx unsigned char: one; or [num_rows, parts]
  unsigned* amax;      // bits of floats. given: one, raised to the largest. Else those between two launches
  long long parts;     // scales of a row
  ScaleRule rule;

  // What a thread carries from row to row: the scale of all, or of the row; the largest it has made.
  struct Carried {
    float factor = 1.0f;
    Largest largest{};
  };
  template <class Row>
  using Scales = ScalesOfRow<scaling, Row>;
  template <int pack_size>
  using Kept = typename Store<Y, Weight, Bias, zero_centered, Rounded>::template Kept<pack_size>;

  template <int pack_size>
  __device__ __forceinline__ Kept<pack_size> keep(long long col) const {
    return {{weight, col}, {bias, col}};
  }
  __device__ __forceinline__ void bring_near(long long num_cols) const {
    prefetch(weight, num_cols);
    prefetch(bias, num_cols);
  }

  __device__ __forceinline__ Carried start() const {
    Carried carried;
    if constexpr (scaling == Scaling::given) carried.factor = scale == nullptr ? 1.0f : *scale;
    if constexpr (scaling == Scaling::tensor && step == Step::write) {
      carried.factor = rule.scale_of(*amax, largest_finite);
    }
    return carried;
  }
  // Of what threads have measured of their parts of a row: its scales. saves: whether this thread is the one that writes what
  // belongs to the row; present: false of a row that others own.
  template <class Row, class Reduce>
  __device__ __forceinline__ void find_scales(long long row, const Row& values_of_row, ScalesOfRow<scaling, Row>& scales,
                                              Reduce& reduce, bool saves, bool present) const {
    if constexpr (scaling == Scaling::row) {
      const LargestOf<!Row::is_tight> largest{{scales.largest().part[0]}};
      scales.factor = scale_of_row(row, reduce.all(largest).bits(), saves);
    } else {
      find_scales_of_blocks(row, values_of_row, scales, present);
    }
  }
  // Those of blocks, which neighbouring lanes have.
  template <class Row>
  __device__ __forceinline__ void find_scales_of_blocks(long long row, const Row& values_of_row,
                                                        ScalesOfRow<scaling, Row>& scales, bool present = true) const {
    using Found = ScalesOfRow<scaling, Row>;
    using Blocks = typename Found::Blocks;
    scales.largest.share_out();
#pragma unroll
    for (int at = 0; at < Blocks::own; ++at) {
      const int index = Blocks::first_own() + at;
      const long long part = values_of_row.col_of(index * Found::packs_per_scale) / cols_of_scale(scaling);
      const Multiplier multiplier = multiplier_of(scales.largest.values[at].bits());
      scales.factors[at] = multiplier.factor;
      const bool is_first = present && Blocks::is_first_holder() && index < Found::num_scales && part < parts;
      if (is_first) save_scale_of(row * parts + part, multiplier);
    }
  }
  // Of Scaling::row: what the threads that share the row have found.
  __device__ __forceinline__ float scale_of_row(long long row, unsigned amax_bits, bool saves) const {
    const float found = rule.scale_of(amax_bits, largest_finite);
    if (saves) static_cast<float*>(scale_inv)[row] = inverse_of(found);
    return found;
  }
  // All lanes of a warp call it, after their last row.
  __device__ __forceinline__ void finish(const Carried& carried) const {
    if constexpr (raises) raise_amax(amax, warp_reduce<32>(carried.largest).bits());
  }
  // By one thread of the grid: the one scale that all share.
  __device__ __forceinline__ void save_scale() const {
    if constexpr (scaling == Scaling::given) *static_cast<float*>(scale_inv) = inverse_of_any(scale == nullptr ? 1.0f : *scale);
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

  template <int pack_size, class Compute>
  __device__ __forceinline__ void store(long long row, long long col, const Compute (&values)[pack_size],
                                        const Kept<pack_size>& kept, bool present, Carried& carried) const {
    static_assert(!has_blocks || step != Step::all, "scales of blocks are found before any of a row is written");
    Compute made[pack_size];
    affine(values, kept, made);
    float factor = carried.factor;
    if constexpr (has_blocks) {
      constexpr int block = cols_of_scale(scaling);
      const long long part = row * parts + static_cast<long long>(static_cast<unsigned long long>(col) / block);
      if constexpr (step == Step::amax) {
        Largest largest{};
        largest.add_pack(made);
        if (present) atomicMax(amax + part, largest.bits());
      } else {
        const Multiplier multiplier = multiplier_of(present ? amax[part] : 0);
        factor = multiplier.factor;
        if (present && static_cast<unsigned>(col) % block == 0) save_scale_of(part, multiplier);
      }
    } else if constexpr (raises) {
      if (present) carried.largest.add_pack(made);
    }
    if constexpr (step != Step::amax) store_made(row, col, made, factor, present);
  }
  // Of what affine has made, where its scale is known.
  template <int pack_size, class Compute>
  __device__ __forceinline__ void store_made(long long row, long long col, Compute (&made)[pack_size], float factor,
                                             bool present) const {
#pragma unroll
    for (Compute& value : made) value = scaling == Scaling::mx ? times(value, factor) : value * factor;
    if (present) store_pack<pack_size>(y + row * y_stride + col, repack_fp8<Y>(made));
  }

 private:
  // Of a block.
  __device__ __forceinline__ Multiplier multiplier_of(unsigned amax_bits) const {
    if constexpr (scaling == Scaling::mx) {
      return multiplier_of_e8m0(e8m0_of(amax_bits, 1.0f / largest_finite));
    } else {
      return {rule.scale_of(amax_bits, largest_finite), 0};
    }
  }
  __device__ __forceinline__ void save_scale_of(long long part, const Multiplier& multiplier) const {
    if constexpr (scaling == Scaling::mx) {
      static_cast<unsigned char*>(scale_inv)[part] = static_cast<unsigned char>(multiplier.e8m0);
    } else {
      static_cast<float*>(scale_inv)[part] = inverse_of(multiplier.factor);
    }
  }
};
