// quantize_store.cuh -- 8 bits: the store that writes y, and the scales of what it writes
//
// Scales of a row, or of parts of it, are found before any of the row is written
// (quantized_row.cuh). Where that does not fit, a first launch (Step::amax) finds the amaxes and
// writes no y. A second one (Step::write) then uses them.
#pragma once
#include "float8.cuh"
#include "forward.cuh"
#include "quantized_row.cuh"
#include "store.cuh"

template <class T>
constexpr int bytes_of = sizeof(T);
template <>
constexpr int bytes_of<void> = 0;

// y = saturate((x_hat * weight + bias) * scale). in_columns: scales of blocks are not in rows.
template <class Y, class Weight, class Bias, bool zero_centered, class Rounded, Scaling scaling,
          Step step, bool in_columns = false>
struct QuantizeStore : Store<Y, Weight, Bias, zero_centered, Rounded> {
  using Base = Store<Y, Weight, Bias, zero_centered, Rounded>;
  using Base::y, Base::y_stride;
  static constexpr bool quantizes = true;
  static constexpr bool has_blocks = scaling == Scaling::block || scaling == Scaling::block64;
  // Whether the scales of a row are found before any of it is written.
  static constexpr bool measures_rows =
      scaling == Scaling::row || (has_blocks && step == Step::all);
  static constexpr bool raises = (scaling == Scaling::given && step == Step::all) ||
                                 (scaling == Scaling::tensor && step == Step::amax);
  static constexpr float largest_finite = FormatOf<Y>::largest;

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
  // Whether y is kept in registers until the scales of its row are known.
  template <class Row>
  static constexpr bool keeps_results = measures_rows && Row::num_kept_results > 0;
  // Whether a thread also has registers for the next row. Few warps fit a multiprocessor beside
  // results that are kept, so loads would not overlap otherwise.
  template <class Load, class Row, Tile tile>
  static constexpr bool fetches_ahead = [] {
    if constexpr (keeps_results<Row> && !Load::has_effect && sizeof(typename Load::Held) == 2) {
      return tile.pack_size == 8 && Row::has_room_for_next && bytes_of<Weight> <= 2 &&
             bytes_of<Bias> <= 2;
    }
    return false;
  }();

  // One thread of the grid writes the scale of the tensor.
  __device__ __forceinline__ Carried start() const {
    Carried carried;
    const bool saves = blockIdx.x == 0 && threadIdx.x == 0;
    if constexpr (scaling == Scaling::given) {
      if (saves) *scale_inv = rule.given_scale_inv(scale);
      carried.factor = rule.given_scale(scale);
    }
    if constexpr (scaling == Scaling::tensor && step == Step::write) {
      if (saves) *scale_inv = inverse_of(rule.scale_of(*amax, largest_finite));
      carried.factor = rule.scale_of(*amax, largest_finite);
    }
    return carried;
  }
  template <bool centered, class Call, class Row, class Compute, class Reduce>
  __device__ __forceinline__ void write_row(const Call& call, const OwnRow& own, Row& values_of_row,
                                            const RowStatistics<Compute>& mean_rstd, Reduce& reduce,
                                            Carried& carried) const {
    write_quantized<centered>(call, own, values_of_row, mean_rstd, reduce, carried);
  }
  // Writes all rows of a block, each while the next one is on its way.
  template <bool centered, Statistics statistics, Tile tile, class Call, class Row, class Reduce>
  __device__ __forceinline__ void write_rows(const Call& call, Row& values, Slice cols,
                                             Reduce& reduce, Carried& carried) const {
    using Compute = typename Row::Compute;
    const Turns<tile> turns(call.num_rows, call.num_first, call.rows_of_first);
    long long row = turns.first_row;
    values.fetch(call.load, row, cols);
    for (unsigned left = turns.count; left > 0; --left) {
      const auto mean_rstd =
          row_statistics<centered, statistics, Compute>(values, reduce, call.num_cols, call.eps);
      const NextRow next{call.load, values, min(row + turns.step, call.num_rows - 1)};
      const OwnRow own{row, threadIdx.x == 0};
      call.save(own, mean_rstd);
      write_quantized<centered>(call, own, values, mean_rstd, reduce, carried, next);
      row += turns.step;
    }
  }
  template <bool centered, class Call, int pack_size, class Kept, class Compute>
  __device__ __forceinline__ void write_pack(const Call& call, const Place& at,
                                             const Compute (&normalized)[pack_size],
                                             const Kept& kept,
                                             const RowStatistics<Compute>& mean_rstd,
                                             Carried& carried) const {
    Compute y_values[pack_size];
    y_of_pack<centered>(call, at, normalized, kept, mean_rstd, y_values);
    store(at, y_values, carried);
  }
  // Called by all lanes of a warp after their last row.
  __device__ __forceinline__ void raise(const Carried& carried) const {
    if constexpr (raises) raise_amax(amax, warp_reduce<32>(carried.largest).bits());
  }

  // The scales of a row whose packs all threads have measured.
  template <class Row, class Reduce>
  __device__ __forceinline__ void find_scales(const OwnRow& own, const Row& values_of_row,
                                              Scales<Row>& scales, Reduce& reduce) const {
    if constexpr (scaling == Scaling::row) {
      const LargestOf<!Row::is_tight> largest{{scales.largest().part[0]}};
      scales.factor = scale_of_row(own, reduce.all(largest).bits());
    } else {
      find_scales_of_blocks(own, values_of_row, scales);
    }
  }
  // The scales of blocks of columns, which neighbouring lanes share.
  template <class Row>
  __device__ __forceinline__ void find_scales_of_blocks(const OwnRow& own, const Row& values_of_row,
                                                        Scales<Row>& scales) const {
    using RowScales = Scales<Row>;
    using Blocks = typename RowScales::Blocks;
    scales.largest.share_out();
#pragma unroll
    for (int at = 0; at < Blocks::own; ++at) {
      const int index = Blocks::first_own() + at;
      const long long part =
          values_of_row.col_of(index * RowScales::packs_per_scale) / cols_of_block<scaling>;
      const float scale = rule.scale_of(scales.largest.values[at].bits(), largest_finite);
      scales.factors[at] = scale;
      const bool is_first = own.present && Blocks::is_first_holder() &&
                            index < RowScales::num_scales && part < places.parts;
      if (is_first) places.template save<in_columns>(scale_inv, own.row, part, inverse_of(scale));
    }
  }
  // The scale of a row. amax_bits: of all threads that share the row.
  __device__ __forceinline__ float scale_of_row(const OwnRow& own, unsigned amax_bits) const {
    const float scale = rule.scale_of(amax_bits, largest_finite);
    if (own.saves && own.present) scale_inv[own.row] = inverse_of(scale);
    return scale;
  }

  // Writes a pack of y.
  template <int pack_size, class Compute>
  __device__ __forceinline__ void store(const Place& at, Compute (&y_values)[pack_size],
                                        Carried& carried) const {
    static_assert(!has_blocks || step != Step::all,
                  "scales of blocks are found before any of a row is written");
    float factor = carried.factor;
    if constexpr (has_blocks) {
      constexpr int cols = cols_of_block<scaling>;
      const auto part = static_cast<long long>(static_cast<unsigned long long>(at.col) / cols);
      unsigned* const own_amax = amax + at.row * places.parts + part;
      if constexpr (step == Step::amax) {
        Largest largest{};
        largest.add_pack(y_values);
        if (at.present) raise_amax_alone(own_amax, largest.bits());
      } else {
        factor = rule.scale_of(at.present ? *own_amax : 0, largest_finite);
        if (at.present && static_cast<unsigned>(at.col) % cols == 0)
          places.template save<in_columns>(scale_inv, at.row, part, inverse_of(factor));
      }
    } else if constexpr (raises) {
      if (at.present) carried.largest.add_pack(y_values);
    }
    if constexpr (step != Step::amax) store_scaled(at, y_values, factor);
  }
  // Scales, rounds and writes y.
  template <int pack_size, class Compute>
  __device__ __forceinline__ void store_scaled(const Place& at, Compute (&y_values)[pack_size],
                                               float factor) const {
#pragma unroll
    for (Compute& value : y_values) value *= factor;
    if (at.present)
      store_pack<pack_size>(y + at.row * y_stride + at.col, repack_8_bits<Y>(y_values));
  }
};
