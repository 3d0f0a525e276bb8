// two_stores.cuh -- two outputs of one x_hat, or one output in two dtypes
#pragma once
#include "store.cuh"

// Two outputs of one x_hat, each with its own weight and bias: y of First, y1 of Second.
template <class First, class Second>
struct TwoStores {
  static constexpr bool quantizes = false;

  First first;
  Second second;

  template <int pack_size>
  struct Kept {
    typename First::template Kept<pack_size> first;
    typename Second::template Kept<pack_size> second;

    __device__ __forceinline__ void forget_unpacked() {
      first.forget_unpacked();
      second.forget_unpacked();
    }
  };
  template <int pack_size>
  __device__ __forceinline__ Kept<pack_size> keep(long long col) const {
    return {first.template keep<pack_size>(col), second.template keep<pack_size>(col)};
  }
  __device__ __forceinline__ void prefetch_parameters(long long num_cols) const {
    first.prefetch_parameters(num_cols);
    second.prefetch_parameters(num_cols);
  }

  template <int pack_size, class Compute>
  __device__ __forceinline__ void store(long long row, long long col,
                                        const Compute (&values)[pack_size],
                                        const Kept<pack_size>& kept, bool present = true) const {
    first.store(row, col, values, kept.first, present);
    second.store(row, col, values, kept.second, present);
  }
};

// y of First, and y1, the same in another dtype. Both are rounded once.
template <class First, class Y1>
struct StoreTwice : First {
  Y1* y1;
  long long y1_stride;

  template <int pack_size, class Compute>
  __device__ __forceinline__ void store(long long row, long long col,
                                        const Compute (&values)[pack_size],
                                        const typename First::template Kept<pack_size>& kept,
                                        bool present = true) const {
    Compute y_values[pack_size];
    First::affine(values, kept, y_values);
    const auto rounded = repack<typename First::Written>(y_values);
    const auto rounded1 = repack<Y1>(y_values);
    if (!present) return;
    store_pack<pack_size>(First::y + row * First::y_stride + col, rounded);
    store_pack<pack_size>(y1 + row * y1_stride + col, rounded1);
  }
};
