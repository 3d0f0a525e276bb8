// forward.cuh -- the argument of every forward kernel
//
// A kernel knows only its row: `load` reads it (load.cuh), `store` writes its results (store.cuh).
// Every thread of a kernel calls start() first, write() for each row, and finish() last.
#pragma once
#include "load.cuh"
#include "statistics.cuh"
#include "store.cuh"

// The row whose results a thread writes.
struct OwnRow {
  long long row;
  bool saves;           // whether this thread, of those that share the row, writes mean and rstd
  bool present = true;  // false beyond the last row: nothing is written
};

template <class Load, class Store>
struct Forward {
  using Compute = typename Load::Compute;
  using Statistics = RowStatistics<Compute>;
  using Stored = Store;

  Load load;
  Store store;
  Compute* mean;  // [num_rows]; null: not wanted, as in RMSNorm
  Compute* rstd;  // [num_rows]; null: not wanted
  long long num_rows;
  long long num_cols;
  double eps;
  long long num_first;  // these two: see Turns (tile.cuh)
  long long rows_of_first;

  // Returns what the thread carries from row to row: Nothing, unless y has 8 bits. The first block
  // also brings weight and bias to the L2 cache while all blocks wait for their rows. That does not
  // pay for narrow rows.
  template <Tile tile>
  __device__ __forceinline__ auto start() const {
    constexpr bool is_narrow = tile.packs_per_thread > 0 && tile.cols() * tile.cluster_size < 512;
    if (!is_narrow && !tile.early && blockIdx.x == 0) store.prefetch_parameters(num_cols);
    if constexpr (Store::quantizes) {
      return store.start();
    } else {
      return Nothing{};
    }
  }

  // Writes y, mean and rstd of one row. reduce: over its threads. carried: what start() returned.
  // parameters: EarlyParameters or LateParameters.
  template <bool centered, class Row, class Reduce, class Carried,
            class Parameters = LateParameters>
  __device__ __forceinline__ void write(const OwnRow& own, Row& values_of_row,
                                        const Statistics& mean_rstd, Reduce& reduce,
                                        Carried& carried, const Parameters& parameters = {}) const {
    const bool present = own.present;  // read first: fewer instructions
    save(own, mean_rstd);
    if constexpr (Store::quantizes) {
      store.template write_row<centered>(*this, own, values_of_row, mean_rstd, reduce, carried);
    } else if (present) {
      values_of_row.for_each_pack_with(
          parameters.loads_for(values_of_row, store),
          [&](long long col, const auto& values, bool in_row, const auto& kept) {
            Compute normalized[Row::pack_size];
            mean_rstd.template normalize<centered>(values, normalized);
            write_pack<centered>({own.row, col, in_row}, normalized, kept, mean_rstd, carried);
          });
    }
  }

  // Writes a pack of y, or of f(y) if the store has a user's functor, which may read other columns.
  template <bool centered, int pack_size, class Kept, class Carried>
  __device__ __forceinline__ void write_pack(const Place& at,
                                             const Compute (&normalized)[pack_size],
                                             const Kept& kept, const Statistics& mean_rstd,
                                             Carried& carried) const {
    if constexpr (Store::quantizes) {
      store.template write_pack<centered>(*this, at, normalized, kept, mean_rstd, carried);
    } else if constexpr (has_functor<Store>) {
      Compute y_values[pack_size];
      store.affine(normalized, kept, y_values);
      store.template finish<centered>(*this, at, store.y + at.row * store.y_stride + at.col,
                                      y_values, mean_rstd);
    } else {
      store.store(at.row, at.col, normalized, kept, at.present);
    }
  }

  __device__ __forceinline__ void save(const OwnRow& own, const Statistics& mean_rstd) const {
    if (!own.saves || !own.present) return;
    if (mean != nullptr) mean[own.row] = mean_rstd.mean;
    if (rstd != nullptr) rstd[own.row] = mean_rstd.rstd;
  }

  template <class Carried>
  __device__ __forceinline__ void finish(const Carried& carried) const {
    if constexpr (Store::quantizes) store.raise(carried);
  }
};

// The paths on which several rows are under way, each in a header of its name. An instance that has
// one includes it (cupynorm/gpu/nvrtc.py).
template <bool centered, Statistics statistics, Tile tile, class Load, class Store>
__device__ __forceinline__ void forward_bundle(const Forward<Load, Store>& call);
template <bool centered, Statistics statistics, Tile tile, class Load, class Store>
__device__ __forceinline__ void forward_ring(const Forward<Load, Store>& call);
