// two_stores.cuh -- two outputs of one x_hat
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
