// forward.cuh -- the argument of every forward kernel
#pragma once
#include "load_store.cuh"
#include "row.cuh"
#include "statistics.cuh"

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

  // One thread of those that share the row calls this.
  __device__ __forceinline__ void save(long long row, const RowStatistics<Compute>& statistics) const {
    if (mean != nullptr) mean[row] = statistics.mean;
    if (rstd != nullptr) rstd[row] = statistics.rstd;
  }

  template <bool centered, class Row>
  __device__ __forceinline__ void write(long long row, Row& values_of_row, const RowStatistics<Compute>& statistics) const {
    values_of_row.for_each_pack_or_none([&](long long col, const auto& values, bool in_row) {
      constexpr int pack_size = sizeof(values) / sizeof(Compute);
      Compute normalized[pack_size];
#pragma unroll
      for (int at = 0; at < pack_size; ++at) normalized[at] = statistics.template normalize<centered>(values[at]);
      store.store(row, col, normalized, store.template keep<pack_size>(in_row ? col : 0), in_row);
    });
  }
};
