// forward.cuh -- the argument of every forward kernel
//
// A kernel knows only its row: `load` reads it (load.cuh), `store` writes its results (store.cuh).
// Every thread of a kernel calls start() first, write() for each row, and finish() last.
#pragma once
#include "functor.cuh"
#include "load.cuh"
#include "quantize_store.cuh"
#include "quantized_row.cuh"
#include "statistics.cuh"
#include "store.cuh"
#include "sum_load.cuh"

template <class Load, class Store>
struct Forward {
  using Compute = typename Load::Compute;
  using Stored = Store;

  Load load;
  Store store;
  Compute* mean;  // [num_rows]; null: not wanted, as in RMSNorm
  Compute* rstd;  // [num_rows]; null: not wanted
  long long num_rows;
  long long num_cols;
  double eps;
  long long num_first;  // these two: see tile.cuh
  long long rows_of_first;

  // Returns what the thread carries from row to row: Nothing, unless y has 8 bits. The first block
  // also brings weight and bias to the L2 cache while all blocks wait for their rows. That does not
  // pay for narrow rows.
  template <Tile tile>
  __device__ __forceinline__ auto start() const {
    constexpr bool is_narrow = tile.packs_per_thread > 0 && tile.cols() * tile.cluster_size < 512;
    if (!is_narrow && !tile.early && blockIdx.x == 0) store.prefetch_parameters(num_cols);
    if constexpr (Store::quantizes) {
      if (blockIdx.x == 0 && threadIdx.x == 0) store.save_scale();
      return store.start();
    } else {
      return Nothing{};
    }
  }

  // Writes y, mean and rstd of one row.
  //   saves        whether this thread is the one of those sharing the row that writes mean and
  //   rstd carried      what `start` returned present      false if the row lies beyond the last
  //   one: nothing is written parameters   EarlyParameters, or LateParameters next         NextRow,
  //   to be fetched meanwhile, or NoNextRow
  template <bool centered, class Row, class Reduce, class Carried,
            class Parameters = LateParameters, class Next = NoNextRow>
  __device__ __forceinline__ void write(long long row, Row& values_of_row,
                                        const RowStatistics<Compute>& mean_rstd, Reduce& reduce,
                                        bool saves, Carried& carried, bool present = true,
                                        const Parameters& parameters = {},
                                        const Next& next = {}) const {
    save(row, mean_rstd, saves && present);
    if constexpr (Store::quantizes) {
      write_quantized<centered>(*this, row, values_of_row, mean_rstd, reduce, saves && present,
                                carried, present, next);
    } else if (present) {
      values_of_row.for_each_pack_with(
          parameters.loads_for(values_of_row, store),
          [&](long long col, const auto& values, bool in_row, const auto& kept) {
            Compute normalized[Row::pack_size];
            mean_rstd.template normalize<centered>(values, normalized);
            write_pack<centered>(row, col, normalized, kept, in_row, mean_rstd, carried);
          });
    }
  }

  // Writes a pack of y, or of f(y) if the store has a user's functor, which may read other columns.
  template <bool centered, int pack_size, class Kept, class Carried>
  __device__ __forceinline__ void write_pack(long long row, long long col,
                                             const Compute (&normalized)[pack_size],
                                             const Kept& kept, bool present,
                                             const RowStatistics<Compute>& mean_rstd,
                                             Carried& carried) const {
    if constexpr (Store::quantizes) {
      Compute y_values[pack_size];
      result<centered>(row, col, normalized, kept, present, mean_rstd, y_values);
      store.store(row, col, y_values, present, carried);
    } else if constexpr (has_functor<Store>) {
      Compute y_values[pack_size];
      store.affine(normalized, kept, y_values);
      store.finish(row, col, store.y + row * store.y_stride + col, y_values,
                   other_y<centered>(row, mean_rstd), present);
    } else {
      store.store(row, col, normalized, kept, present);
    }
  }
  // A pack of y in the compute type, after a user's functor if there is one.
  template <bool centered, int pack_size, class Kept>
  __device__ __forceinline__ void result(long long row, long long col,
                                         const Compute (&normalized)[pack_size], const Kept& kept,
                                         bool present, const RowStatistics<Compute>& mean_rstd,
                                         Compute (&y_values)[pack_size]) const {
    store.affine(normalized, kept, y_values);
    if constexpr (has_functor<Store>) {  // its arrays have no row or column beyond the last one
      if (present) store.functor.apply(row, col, y_values, other_y<centered>(row, mean_rstd));
    }
  }
  template <bool centered>
  __device__ __forceinline__ auto other_y(long long row,
                                          const RowStatistics<Compute>& mean_rstd) const {
    return OtherY<centered, Load, Store, RowStatistics<Compute>>{load, store, mean_rstd, row};
  }

  // Writes mean and rstd of one row, if `saves`.
  __device__ __forceinline__ void save(long long row, const RowStatistics<Compute>& mean_rstd,
                                       bool saves) const {
    if (!saves) return;
    if (mean != nullptr) mean[row] = mean_rstd.mean;
    if (rstd != nullptr) rstd[row] = mean_rstd.rstd;
  }

  template <class Carried>
  __device__ __forceinline__ void finish(const Carried& carried) const {
    if constexpr (Store::quantizes) store.raise(carried);
  }
};
