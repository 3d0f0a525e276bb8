// quantize_store.cuh -- fp8: the store that writes 8-bit floats and their scales
#pragma once
#include "quantize_scales.cuh"

template <class T>
constexpr int bytes_of = sizeof(T);
template <>
constexpr int bytes_of<void> = 0;

// y = saturate((x_hat * weight + bias) * scale).
template <class Y, class Weight, class Bias, bool zero_centered, class Rounded, Scaling scaling,
          Step step, bool in_columns = false>
struct QuantizeStore
    : QuantizeScales<Store<Y, Weight, Bias, zero_centered, Rounded>, scaling, step, in_columns> {
  using Base =
      QuantizeScales<Store<Y, Weight, Bias, zero_centered, Rounded>, scaling, step, in_columns>;
  using Base::amax, Base::has_blocks, Base::largest_finite, Base::places, Base::raises, Base::rule,
      Base::scale_inv, Base::y, Base::y_stride;
  using typename Base::Carried;
  static constexpr bool has_wide_parameters = bytes_of<Weight> > 2 || bytes_of<Bias> > 2;

  // Writes a pack of y.
  template <int pack_size, class Compute>
  __device__ __forceinline__ void store(long long row, long long col,
                                        Compute (&y_values)[pack_size], bool present,
                                        Carried& carried) const {
    static_assert(!has_blocks || step != Step::all,
                  "scales of blocks are found before any of a row is written");
    float factor = carried.factor;
    if constexpr (has_blocks) {
      constexpr int cols = cols_of_block<scaling>;
      const auto part = static_cast<long long>(static_cast<unsigned long long>(col) / cols);
      unsigned* const own_amax = amax + row * places.parts + part;
      if constexpr (step == Step::amax) {
        Largest largest{};
        largest.add_pack(y_values);
        if (present) raise_amax_alone(own_amax, largest.bits());
      } else {
        factor = rule.scale_of(present ? *own_amax : 0, largest_finite);
        if (present && static_cast<unsigned>(col) % cols == 0)
          places.template save<in_columns>(scale_inv, row, part, inverse_of(factor));
      }
    } else if constexpr (raises) {
      if (present) carried.largest.add_pack(y_values);
    }
    if constexpr (step != Step::amax) store_scaled(row, col, y_values, factor, present);
  }
  // Scales, rounds and writes y.
  template <int pack_size, class Compute>
  __device__ __forceinline__ void store_scaled(long long row, long long col,
                                               Compute (&y_values)[pack_size], float factor,
                                               bool present) const {
#pragma unroll
    for (Compute& value : y_values) value *= factor;
    if (present) store_pack<pack_size>(y + row * y_stride + col, repack_8_bits<Y>(y_values));
  }
};
