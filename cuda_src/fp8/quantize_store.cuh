// quantize_store.cuh -- 8 bits: the store that writes y, and the scales of what it writes
//
// Scales of a row, or of parts of it, are found before any of the row is written
// (quantized_row.cuh). Where that does not fit, a first launch (Step::amax) finds the amaxes and
// writes no y. A second one (Step::write) then uses them.
#pragma once
#include "float8.cuh"
#include "quantized_row.cuh"
#include "store.cuh"

// What QuantizeStore (quantize_store.cuh) has in memory, and how it finds and writes scales.
// AffineStore: a Store, which keeps and applies weight and bias. in_columns: scales of blocks are
// not in rows.
template <class AffineStore, Scaling scaling, Step step, bool in_columns>
struct QuantizeScales : AffineStore {
  static constexpr bool quantizes = true;
  static constexpr bool has_blocks = scaling == Scaling::block || scaling == Scaling::block64;
  // Whether the scales of a row are found before any of it is written.
  static constexpr bool measures_rows =
      scaling == Scaling::row || (has_blocks && step == Step::all);
  static constexpr bool raises = (scaling == Scaling::given && step == Step::all) ||
                                 (scaling == Scaling::tensor && step == Step::amax);
  static constexpr float largest_finite = FormatOf<typename AffineStore::Written>::largest;

  const float* scale;  // given: one, or null
  float* scale_inv;    // one, or [num_rows, parts]
  // Bits of floats. given: one, raised to the largest |y|. Else: those that a first launch finds.
  unsigned* amax;
  ScalePlaces places;
  ScaleRule rule;

  // What a thread carries from row to row: the scale of the tensor or of the row; the largest |y|.
  struct Carried {
    float factor = 1.0f;
    Largest largest{};
  };
  template <class Row>
  using Scales = ScalesOfRow<scaling, Row>;

  __device__ __forceinline__ Carried start() const {
    Carried carried;
    if constexpr (scaling == Scaling::given) carried.factor = rule.given_scale(scale);
    if constexpr (scaling == Scaling::tensor && step == Step::write) {
      carried.factor = rule.scale_of(*amax, largest_finite);
    }
    return carried;
  }
  // The scales of a row whose packs all threads have measured. saves: whether this thread writes
  // what belongs to the row; present: false for a row that other threads own.
  template <class Row, class Reduce>
  __device__ __forceinline__ void find_scales(long long row, const Row& values_of_row,
                                              ScalesOfRow<scaling, Row>& scales, Reduce& reduce,
                                              bool saves, bool present) const {
    if constexpr (scaling == Scaling::row) {
      const LargestOf<!Row::is_tight> largest{{scales.largest().part[0]}};
      scales.factor = scale_of_row(row, reduce.all(largest).bits(), saves);
    } else {
      find_scales_of_blocks(row, values_of_row, scales, present);
    }
  }
  // The scales of blocks of columns, which neighbouring lanes share.
  template <class Row>
  __device__ __forceinline__ void find_scales_of_blocks(long long row, const Row& values_of_row,
                                                        ScalesOfRow<scaling, Row>& scales,
                                                        bool present = true) const {
    using RowScales = ScalesOfRow<scaling, Row>;
    using Blocks = typename RowScales::Blocks;
    scales.largest.share_out();
#pragma unroll
    for (int at = 0; at < Blocks::own; ++at) {
      const int index = Blocks::first_own() + at;
      const long long part =
          values_of_row.col_of(index * RowScales::packs_per_scale) / cols_of_block<scaling>;
      const float scale = rule.scale_of(scales.largest.values[at].bits(), largest_finite);
      scales.factors[at] = scale;
      const bool is_first = present && Blocks::is_first_holder() && index < RowScales::num_scales &&
                            part < places.parts;
      if (is_first) places.template save<in_columns>(scale_inv, row, part, inverse_of(scale));
    }
  }
  // The scale of a row. amax_bits: of all threads that share the row.
  __device__ __forceinline__ float scale_of_row(long long row, unsigned amax_bits,
                                                bool saves) const {
    const float scale = rule.scale_of(amax_bits, largest_finite);
    if (saves) scale_inv[row] = inverse_of(scale);
    return scale;
  }
  // Called by all lanes of a warp after their last row.
  __device__ __forceinline__ void raise(const Carried& carried) const {
    if constexpr (raises) raise_amax(amax, warp_reduce<32>(carried.largest).bits());
  }
  // Called by one thread of the grid: writes the scale of the tensor.
  __device__ __forceinline__ void save_scale() const {
    if constexpr (scaling == Scaling::given) *scale_inv = rule.given_scale_inv(scale);
    if constexpr (scaling == Scaling::tensor && step == Step::write) {
      *scale_inv = inverse_of(rule.scale_of(*amax, largest_finite));
    }
  }
};

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
