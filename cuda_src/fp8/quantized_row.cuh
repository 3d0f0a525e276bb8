// quantized_row.cuh -- 8 bits: the writing of one row, whose scales may depend on the row itself
//
// Then y is computed before its scales are known. If a thread has the registers, it keeps y until
// then and computes it once. Otherwise it computes y twice: to find the scales, then to write.
#pragma once
#include "forward.cuh"
#include "scales.cuh"
#include "statistics.cuh"
#include "store.cuh"

// num_values largest magnitudes, each over `lanes` neighbouring lanes. The lanes divide the values
// among themselves: every exchange halves the values that a lane still compares. In the end a lane
// knows `own` values from first_own() on and computes their scales for all. Indices from num_values
// on are unused.
template <int lanes, int num_values>
struct SharedLargest {
  static constexpr int places = power_of_two_from(num_values);
  static constexpr int own = places > lanes ? places / lanes : 1;
  // Neighbouring lanes that know the same values.
  static constexpr int holders = places < lanes ? lanes / places : 1;

  Largest values[num_values]{};

  __device__ __forceinline__ static int first_own() {
    return static_cast<int>(threadIdx.x % lanes) / holders * own;
  }
  __device__ __forceinline__ static bool is_first_holder() { return threadIdx.x % holders == 0; }

  // Called by all lanes of a warp, as is from_owner().
  __device__ __forceinline__ void share_out() { share_out_with<lanes / 2, num_values>(); }
  // What its owner computed of value `index`. computed: what this lane computed of its own values.
  __device__ __forceinline__ static float from_owner(const float (&computed)[own], int index) {
    return __shfl_sync(0xffffffffu, computed[index % own], index / own * holders, lanes);
  }

 private:
  // Exchanges with the lane `distance` away, then with nearer ones. left: values that this lane
  // still has.
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

// The scales of a row: measure() each pack, then find them (QuantizeStore::find_scales), then
// of_pack(). The scale of a block belongs to `lanes` neighbouring lanes and to packs_per_scale
// packs of each.
template <Scaling scaling, class Row>
struct ScalesOfRow {
  static constexpr int packs_per_block = cols_of_block<scaling> / Row::pack_size;
  static constexpr int lanes =
      packs_per_block < Row::threads_per_row ? packs_per_block : Row::threads_per_row;
  static constexpr int packs_per_scale = packs_per_block / lanes;
  static constexpr int num_scales = (Row::num_kept_results + packs_per_scale - 1) / packs_per_scale;
  static_assert(lanes <= 32 && packs_per_block % lanes == 0 && Row::threads_per_row % lanes == 0,
                "the columns of a scale belong to lanes of one warp and to whole packs");
  using Blocks = SharedLargest<lanes, num_scales>;

  Blocks largest{};
  float factors[Blocks::own];
  float factor;

  template <class Compute>
  __device__ __forceinline__ void measure(int pack, const Compute (&results)[Row::pack_size],
                                          bool in_row) {
    if (in_row) largest.values[pack / packs_per_scale].add_pack(results);
  }
  // Called for one pack after the other.
  __device__ __forceinline__ float of_pack(int pack) {
    if (pack % packs_per_scale == 0) factor = Blocks::from_owner(factors, pack / packs_per_scale);
    return factor;
  }
};
template <class Row>
struct ScalesOfRow<Scaling::row, Row> {
  Extremes extremes;  // used if there are registers for two maxima
  Largest largest_of_packs{};
  float factor;

  template <class Compute>
  __device__ __forceinline__ void measure(int, const Compute (&results)[Row::pack_size],
                                          bool in_row) {
    if constexpr (Row::has_spare_registers) {
      if (in_row) extremes.add_pack(results);
    } else {
      if (in_row) largest_of_packs.add_pack(results);
    }
  }
  __device__ __forceinline__ Largest largest() const {
    Largest largest = largest_of_packs;
    largest.add(extremes.bits());
    return largest;
  }
  __device__ __forceinline__ float of_pack(int) const { return factor; }
};

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

// y in the compute type, before it is scaled; after a user's functor if there is one. call: a
// Forward.
template <bool centered, class Call, int pack_size, class Kept, class Compute>
__device__ __forceinline__ void y_of_pack(const Call& call, const Place& at,
                                          const Compute (&normalized)[pack_size], const Kept& kept,
                                          const RowStatistics<Compute>& mean_rstd,
                                          Compute (&y_values)[pack_size]) {
  call.store.affine(normalized, kept, y_values);
  if constexpr (has_functor<typename Call::Stored>)
    call.store.template apply<centered>(call, at, y_values, mean_rstd);
}

// f(col, y_values, in_row) for each pack.
template <bool centered, class Call, class Row, class Compute, class F>
__device__ __forceinline__ void for_each_y(const Call& call, const OwnRow& own, Row& values_of_row,
                                           const RowStatistics<Compute>& mean_rstd, F f) {
  values_of_row.for_each_pack_with(
      LateParameters{}.loads_for(values_of_row, call.store),
      [&](long long col, const auto& values, bool in_row, const auto& kept) {
        Compute normalized[Row::pack_size], y_values[Row::pack_size];
        mean_rstd.template normalize<centered>(values, normalized);
        y_of_pack<centered>(call, {own.row, col, in_row && own.present}, normalized, kept,
                            mean_rstd, y_values);
        f(col, y_values, in_row);
      });
}

// Writes one row. next: a NextRow, or NoNextRow.
template <bool centered, class Call, class Row, class Compute, class Reduce, class Carried,
          class Next = NoNextRow>
__device__ __forceinline__ void write_quantized(const Call& call, const OwnRow& own,
                                                Row& values_of_row,
                                                const RowStatistics<Compute>& mean_rstd,
                                                Reduce& reduce, Carried& carried,
                                                const Next& next = {}) {
  using Store = typename Call::Stored;
  const auto& store = call.store;
  if constexpr (Store::template keeps_results<Row>) {
    typename Store::template Scales<Row> scales;
    Compute results[Row::num_kept_results][Row::pack_size];
    int pack = 0;
    for_each_y<centered>(call, own, values_of_row, mean_rstd,
                         [&](long long, const auto& y_values, bool in_row) {
                           scales.measure(pack, y_values, in_row);
#pragma unroll
                           for (int at = 0; at < Row::pack_size; ++at)
                             results[pack][at] = y_values[at];
                           ++pack;
                         });
    next.fetch();  // while the scales are found
    store.find_scales(own, values_of_row, scales, reduce);
    pack = 0;
    values_of_row.for_each_col([&](long long col, bool in_row) {
      store.store_scaled({own.row, col, in_row && own.present}, results[pack],
                         scales.of_pack(pack));
      ++pack;
    });
  } else {
    if constexpr (Store::measures_rows) {
      Largest largest{};
      for_each_y<centered>(call, own, values_of_row, mean_rstd,
                           [&](long long, const auto& y_values, bool in_row) {
                             if (in_row) largest.add_pack(y_values);
                           });
      carried.factor = store.scale_of_row(own, reduce.all(largest).bits());
    }
    for_each_y<centered>(call, own, values_of_row, mean_rstd,
                         [&](long long col, auto& y_values, bool in_row) {
                           store.store({own.row, col, in_row && own.present}, y_values, carried);
                         });
  }
}
