// sum_load.cuh -- the loads of x + residual: of one dtype, or of any
//
// ResidualLoad   both of one dtype, which the copy engine can fetch
// SumLoad        of any dtypes, rounded once to Sum; x may first go through functors. The copy
//                engine cannot fetch it, so it has no streams (load.cuh)
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

// Residual: void if there is none. `sum` is needed: later passes read the row from it.
// form(row, col): the row again, from x and the residual.
template <class X, class Residual, class Sum, class Functor = Nothing>
struct SumLoad : Functor {
  using Held = Sum;
  using Compute = typename ComputeOf<Sum>::type;
  using Wide = typename WiderOf<typename WiderOf<X, Residual>::type, Sum>::type;
  static constexpr bool has_effect = true;

  template <int pack_size>
  struct Begun {
    Pack<X, pack_size> x;
    Pack<typename Otherwise<Residual, X>::type, pack_size> residual;
  };

  const X* x;
  long long x_stride;
  const Residual* residual;
  long long residual_stride;
  Sum* sum;
  long long sum_stride;

  template <int pack_size>
  __device__ __forceinline__ Begun<pack_size> begin(long long row, long long col) const {
    Begun<pack_size> begun;
    begun.x = load_pack<pack_size>(x + row * x_stride + col);
    if constexpr (!is_same<Residual, void>)
      begun.residual = load_pack<pack_size>(residual + row * residual_stride + col);
    return begun;
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<Sum, pack_size> rounded(long long row, long long col,
                                                          const Begun<pack_size>& begun) const {
    Wide values[pack_size];
    unpack(begun.x, values);
    if constexpr (!is_same<Functor, Nothing>)
      Functor::apply(row, col, values, OtherX<X, Wide>{x + row * x_stride});
    if constexpr (!is_same<Residual, void>) {
      Wide added[pack_size];
      unpack(begun.residual, added);
#pragma unroll
      for (int at = 0; at < pack_size; ++at) values[at] += added[at];
    }
    return repack<Sum>(values);
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<Sum, pack_size> finish(long long row, long long col,
                                                         const Begun<pack_size>& begun,
                                                         bool present = true) const {
    const Pack<Sum, pack_size> formed = rounded(row, col, begun);
    if (present) store_pack<pack_size>(sum + row * sum_stride + col, formed);
    return formed;
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<Sum, pack_size> form(long long row, long long col) const {
    return rounded(row, col, begin<pack_size>(row, col));
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<Sum, pack_size> load(long long row, long long col) const {
    return finish(row, col, begin<pack_size>(row, col));
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<Sum, pack_size> reload(long long row, long long col) const {
    return load_pack<pack_size>(sum + row * sum_stride + col);
  }
};
