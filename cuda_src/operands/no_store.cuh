// no_store.cuh -- the store of a forward that returns mean and rstd alone
#pragma once
#include "store.cuh"

// Writes nothing. It has the members of every Store, so that the host fills it in the same way.
template <bool zero_centered>
struct Store<void, void, void, zero_centered, void> {
  static constexpr bool quantizes = false;

  void* y;
  long long y_stride;
  const void* weight;
  const void* bias;

  template <int pack_size>
  struct Kept {
    __device__ __forceinline__ void forget_unpacked() {}
  };
  template <int pack_size>
  __device__ __forceinline__ Kept<pack_size> keep(long long) const {
    return {};
  }
  __device__ __forceinline__ void prefetch_parameters(long long) const {}
  template <int pack_size, class Compute>
  __device__ __forceinline__ void store(long long, long long, const Compute (&)[pack_size],
                                        const Kept<pack_size>&, bool = true) const {}
};
