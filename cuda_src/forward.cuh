// forward.cuh -- the argument of every forward kernel
#pragma once
#include "fp8.cuh"
#include "load_store.cuh"
#include "row.cuh"
#include "statistics.cuh"

struct Nothing {};

template <class Load, class Store>
struct Forward {
  using Compute = typename Load::Compute;

  Load load;
  Store store;
  Compute* mean;  // [num_rows]; null: not wanted, as in RMSNorm
  Compute* rstd;  // [num_rows]; null: not wanted
  long long num_rows;
  long long num_cols;
  double eps;
  long long num_first;  // see Turns
  long long rows_of_first;

  // saves: whether this thread is the one of those that share the row which writes what belongs to the row.
  __device__ __forceinline__ void save(long long row, const RowStatistics<Compute>& statistics, bool saves) const {
    if (!saves) return;
    if (mean != nullptr) mean[row] = statistics.mean;
    if (rstd != nullptr) rstd[row] = statistics.rstd;
  }

  // Every thread calls this first, and has what it carries from row to row. Weights and biases of rows that are not narrow are
  // on their way while all wait for their rows, and not only when the first has been met.
  template <Tile tile>
  __device__ __forceinline__ auto start() const {
    constexpr bool narrow = tile.packs_per_thread > 0 && tile.cols() * tile.cluster_size < 512;
    if (!narrow && blockIdx.x == 0) store.bring_near(num_cols);
    if constexpr (Store::quantizes) {
      if (blockIdx.x == 0 && threadIdx.x == 0) store.save_scale();
      return store.start();
    } else {
      return Nothing{};
    }
  }
  // And this last.
  template <class Carried>
  __device__ __forceinline__ void finish(const Carried& carried) const {
    if constexpr (Store::quantizes) store.finish(carried);
  }

  // Whether y waits in registers for scales that are sought in its row.
  template <class Row>
  static constexpr bool waits = [] {
    if constexpr (Store::quantizes) return Store::measures_rows && Row::most_made > 0;
    return false;
  }();

  // Whether a thread, beside a row's y that waits, has registers for the next row: to 8 bits a multiprocessor has few warps,
  // all of which would wait for their rows.
  template <class Row, Tile tile>
  static constexpr bool fetches_ahead = [] {
    if constexpr (waits<Row> && !Load::has_effect && sizeof(typename Load::Held) == 2) {
      return tile.pack_size == 8 && Row::has_room_for_next && !Store::has_wide_parameters;
    }
    return false;
  }();

  // carried: what `start` gave. present: false of a row that others own. next: NextRow, or NoNextRow
  template <bool centered, class Row, class Reduce, class Carried, class Next = NoNextRow>
  __device__ __forceinline__ void write(long long row, Row& values_of_row, const RowStatistics<Compute>& statistics,
                                        Reduce& reduce, bool saves, Carried& carried, bool present = true,
                                        const Next& next = {}) const {
    save(row, statistics, saves && present);
    if constexpr (Store::quantizes) {
      write_quantized<centered>(row, values_of_row, statistics, reduce, saves && present, carried, present, next);
    } else if (present) {
      values_of_row.for_each_pack_with(keep<Row>(), [&](long long col, const auto& values, bool in_row, const auto& kept) {
        Compute normalized[Row::pack_size];
        statistics.template normalize<centered>(values, normalized);
        store.store(row, col, normalized, kept, in_row);
      });
    }
  }

 private:
  // Loads what the store needs of a pack of columns.
  template <class Row>
  __device__ __forceinline__ auto keep() const {
    return [&](long long col) { return store.template keep<Row::pack_size>(col); };
  }

  // f(col, made, in_row) for each pack: y before it is scaled.
  template <bool centered, class Row, class F>
  __device__ __forceinline__ void for_each_made(Row& values_of_row, const RowStatistics<Compute>& statistics, F f) const {
    values_of_row.for_each_pack_with(keep<Row>(), [&](long long col, const auto& values, bool in_row, const auto& kept) {
      Compute normalized[Row::pack_size], made[Row::pack_size];
      statistics.template normalize<centered>(values, normalized);
      store.affine(normalized, kept, made);
      f(col, made, in_row);
    });
  }

  template <bool centered, class Row, class Reduce, class Carried, class Next>
  __device__ __forceinline__ void write_quantized(long long row, Row& values_of_row, const RowStatistics<Compute>& statistics,
                                                  Reduce& reduce, bool saves, Carried& carried, bool present,
                                                  const Next& next) const {
    if constexpr (waits<Row>) {
      // Made once: y waits for its scales in registers.
      typename Store::template Scales<Row> scales;
      Compute waiting[Row::most_made][Row::pack_size];
      int pack = 0;
      for_each_made<centered>(values_of_row, statistics, [&](long long, const auto& made, bool in_row) {
        scales.measure(pack, made, in_row);
#pragma unroll
        for (int at = 0; at < Row::pack_size; ++at) waiting[pack][at] = made[at];
        ++pack;
      });
      // While scales are sought; MXFP8, which has the most of them, has no registers for it before they are found.
      constexpr bool late = Store::is_mx && centered;
      if constexpr (!late) next.fetch();
      store.find_scales(row, values_of_row, scales, reduce, saves, present);
      if constexpr (late) next.fetch();
      pack = 0;
      values_of_row.for_each_col([&](long long col, bool in_row) {
        store.store_made(row, col, waiting[pack], scales.of_pack(pack), in_row && present);
        ++pack;
      });
    } else {
      if constexpr (Store::measures_rows) {
        Largest largest{};
        for_each_made<centered>(values_of_row, statistics, [&](long long, const auto& made, bool in_row) {
          if (in_row) largest.add_pack(made);
        });
        carried.factor = store.scale_of_row(row, reduce.all(largest).bits(), saves);
      }
      values_of_row.for_each_pack_with(keep<Row>(), [&](long long col, const auto& values, bool in_row, const auto& kept) {
        Compute normalized[Row::pack_size];
        statistics.template normalize<centered>(values, normalized);
        store.store(row, col, normalized, kept, in_row && present, carried);
      });
    }
  }
};
