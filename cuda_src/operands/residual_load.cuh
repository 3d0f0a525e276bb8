// residual_load.cuh -- the load of the sum of x and a residual of the same dtype
#pragma once
#include "load.cuh"

// x + residual, rounded once to their dtype. The rounded sum is normalised: a fused call gives the
// same bits as normalising the sum that it returns, and backward reads the row that forward used.
template <class X>
struct ResidualLoad {
  using Held = X;
  using Compute = typename ComputeOf<X>::type;
  static constexpr int num_streams = 2;
  static constexpr bool has_effect = true;

  template <int pack_size>
  struct Begun {
    Pack<X, pack_size> packs[2];
  };

  const X* x;
  long long x_stride;
  const X* residual;
  long long residual_stride;
  X* sum;  // null: not wanted
  long long sum_stride;

  __device__ __forceinline__ long long stride(int stream) const {
    return stream == 0 ? x_stride : residual_stride;
  }
  __device__ __forceinline__ const X* row_start(long long row, int stream) const {
    return (stream == 0 ? x : residual) + row * stride(stream);
  }

  template <int pack_size>
  __device__ __forceinline__ Begun<pack_size> begin(long long row, long long col) const {
    return {{load_pack<pack_size>(row_start(row, 0) + col),
             load_pack<pack_size>(row_start(row, 1) + col)}};
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<X, pack_size> finish(long long row, long long col,
                                                       const Begun<pack_size>& begun,
                                                       bool present = true) const {
    const Pack<X, pack_size> added = combine(begun.packs);
    if (sum != nullptr && present) store_pack<pack_size>(sum + row * sum_stride + col, added);
    return added;
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<X, pack_size> load(long long row, long long col) const {
    return finish(row, col, begin<pack_size>(row, col));
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<X, pack_size> reload(long long row, long long col) const {
    return combine(begin<pack_size>(row, col).packs);
  }

  template <int pack_size>
  __device__ __forceinline__ static Pack<X, pack_size> combine(
      const Pack<X, pack_size> (&packs)[2]) {
    Compute left[pack_size], right[pack_size];
    unpack(packs[0], left);
    unpack(packs[1], right);
#pragma unroll
    for (int at = 0; at < pack_size; ++at) left[at] += right[at];
    return repack<X>(left);
  }
  // values: those of a combined pack, so that rounding does not change them.
  template <int pack_size>
  __device__ __forceinline__ void keep(long long row, long long col,
                                       const Compute (&values)[pack_size], bool present) const {
    if (sum != nullptr && present)
      store_pack<pack_size>(sum + row * sum_stride + col, repack<X>(values));
  }
};
