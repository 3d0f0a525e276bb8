// quantized_write.cuh -- fp8: the writing of one row in 8 bits
//
// If the scales depend on the row itself, y is computed before they are known. If a thread has the
// registers, it keeps y until then and computes it once. Otherwise it computes y twice: to find the
// scales, then to write. The store of the call is a QuantizeStore.
#pragma once
#include "amax.cuh"
#include "early_parameters.cuh"
#include "mean_rstd.cuh"

// fetch() loads the next row of a thread into the same registers while the results of the present
// one are written. After the last row it is the last row again: a condition would take registers.
template <class Load, class Row>
struct NextRow {
  const Load& load;
  Row& values;
  long long row;

  __device__ __forceinline__ void fetch() const { values.fetch(load, row, values.cols); }
};
struct NoNextRow {
  __device__ __forceinline__ void fetch() const {}
};

// Whether y is kept in registers until the scales of its row are known.
template <class Store, class Row>
constexpr bool keeps_results = [] {
  if constexpr (Store::quantizes) return Store::measures_rows && Row::num_kept_results > 0;
  return false;
}();

// Whether a thread also has registers for the next row. Few warps fit a multiprocessor beside
// results that are kept, so loads would not overlap otherwise.
template <class Load, class Store, class Row, Tile tile>
constexpr bool fetches_ahead = [] {
  if constexpr (keeps_results<Store, Row> && !Load::has_effect &&
                sizeof(typename Load::Held) == 2) {
    return tile.pack_size == 8 && Row::has_room_for_next && !Store::has_wide_parameters;
  }
  return false;
}();

// f(col, y_values, in_row) for each pack: y in the compute type, before it is scaled.
template <bool centered, class Call, class Row, class Compute, class F>
__device__ __forceinline__ void for_each_result(const Call& call, long long row, Row& values_of_row,
                                                const RowStatistics<Compute>& statistics,
                                                bool present, F f) {
  values_of_row.for_each_pack_with(
      LateParameters{}.loads_for(values_of_row, call.store),
      [&](long long col, const auto& values, bool in_row, const auto& kept) {
        Compute normalized[Row::pack_size], y_values[Row::pack_size];
        statistics.template normalize<centered>(values, normalized);
        call.template result<centered>(row, col, normalized, kept, in_row && present, statistics,
                                       y_values);
        f(col, y_values, in_row);
      });
}

// The arguments are those of Forward::write.
template <bool centered, class Call, class Row, class Compute, class Reduce, class Carried,
          class Next>
__device__ __forceinline__ void write_quantized(const Call& call, long long row, Row& values_of_row,
                                                const RowStatistics<Compute>& statistics,
                                                Reduce& reduce, bool saves, Carried& carried,
                                                bool present, const Next& next) {
  const auto& store = call.store;
  using Store = typename Call::Stored;
  if constexpr (keeps_results<Store, Row>) {
    typename Store::template Scales<Row> scales;
    Compute results[Row::num_kept_results][Row::pack_size];
    int pack = 0;
    for_each_result<centered>(call, row, values_of_row, statistics, present,
                              [&](long long, const auto& y_values, bool in_row) {
                                scales.measure(pack, y_values, in_row);
#pragma unroll
                                for (int at = 0; at < Row::pack_size; ++at) {
                                  results[pack][at] = y_values[at];
                                }
                                ++pack;
                              });
    next.fetch();  // while the scales are found
    store.find_scales(row, values_of_row, scales, reduce, saves, present);
    pack = 0;
    values_of_row.for_each_col([&](long long col, bool in_row) {
      store.store_scaled(row, col, results[pack], scales.of_pack(pack), in_row && present);
      ++pack;
    });
  } else {
    if constexpr (Store::measures_rows) {
      Largest largest{};
      for_each_result<centered>(call, row, values_of_row, statistics, present,
                                [&](long long, const auto& y_values, bool in_row) {
                                  if (in_row) largest.add_pack(y_values);
                                });
      carried.factor = store.scale_of_row(row, reduce.all(largest).bits(), saves);
    }
    for_each_result<centered>(call, row, values_of_row, statistics, present,
                              [&](long long col, auto& y_values, bool in_row) {
                                store.store(row, col, y_values, in_row && present, carried);
                              });
  }
}
