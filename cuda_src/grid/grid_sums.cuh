// grid_sums.cuh -- the sums of dweight and dbias of a pack of columns, in registers
#pragma once
#include "backward.cuh"

template <Gradients gradients, int pack_size>
struct GridPackSums {
  static constexpr int num_registers = pack_size * (gradients.dweight + gradients.dbias);

  float dweight[pack_size] = {};
  float dbias[pack_size] = {};

  __device__ __forceinline__ void add(int at, float x_hat, float dy) {
    if constexpr (gradients.dweight) dweight[at] += dy * x_hat;
    if constexpr (gradients.dbias) dbias[at] += dy;
  }
  // call: a Backward. adds: to sums of earlier rows, which were written.
  template <class Call>
  __device__ __forceinline__ void write(const Call& call, long long col, bool adds) const {
    if constexpr (gradients.dweight) write(call.dweight_partials + col, dweight, adds);
    if constexpr (gradients.dbias) write(call.dbias_partials + col, dbias, adds);
  }

 private:
  template <class Written>
  __device__ __forceinline__ static void write(Written* to, const float (&sums)[pack_size],
                                               bool adds) {
    float values[pack_size] = {};
    if (adds) unpack(load_pack<pack_size>(to), values);
#pragma unroll
    for (int at = 0; at < pack_size; ++at) values[at] += sums[at];
    store_pack<pack_size>(to, repack<Written>(values));
  }
};
