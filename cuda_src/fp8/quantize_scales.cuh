// quantize_scales.cuh -- fp8: the scales of what is written in 8 bits
//
// Scales of a row, or of parts of it, are found before any of the row is written
// (quantized_write.cuh). Where that does not fit, a first launch (Step::amax) finds the amaxes and
// writes no y. A second one (Step::write) then uses them.
#pragma once
#include "float8.cuh"
#include "row_scales.cuh"
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
