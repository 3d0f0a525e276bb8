// other_columns.cuh -- how a user's functor reads other columns of its row
#pragma once
#include "load.cuh"

// x of any column of a row, as it is in memory.
template <class X, class C>
struct OtherX {
  const X* row_start;

  __device__ __forceinline__ C operator()(long long col) const {
    return load_element<C>(row_start + col);
  }
};

// y of any column of a row, before the functor: computed again from x.
template <bool centered, class Load, class Store, class Statistics>
struct OtherY {
  using Compute = typename Load::Compute;

  const Load& load;
  const Store& store;
  const Statistics& statistics;
  long long row;

  __device__ __forceinline__ Compute operator()(long long col) const {
    Compute values[1] = {load_one(load, row, col)}, normalized[1], y[1];
    statistics.template normalize<centered>(values, normalized);
    store.affine(normalized, store.template keep<1>(col), y);
    return y[0];
  }
};
