// recomputing_store.cuh -- the store that writes dx, and y again
#pragma once
#include "store.cuh"

// Writes dx through StoreDx, and y again through forward's store. So a layer that needs y in
// backward need not keep it. The kernel has x_hat and the weight anyway, for dx.
template <class StoreDx, class Y, class Weight, class Bias, bool zero_centered>
struct RecomputingStore : StoreDx {
  static constexpr bool recomputes = true;
  using LoadBias = LoadParameter<Bias, false, 0>;

  Store<Y, Weight, Bias, zero_centered> store_y;

  __device__ __forceinline__ LoadBias load_bias() const { return {store_y.bias}; }

  template <int pack_size, class Compute>
  __device__ __forceinline__ void recompute(long long row, long long col,
                                            const Compute (&x_hats)[pack_size],
                                            const Compute (&weights)[pack_size],
                                            const Compute (&biases)[pack_size],
                                            bool present = true) const {
    store_y.store(row, col, x_hats, weights, biases, present);
  }
};
