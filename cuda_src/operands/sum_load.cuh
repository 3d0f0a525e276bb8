// sum_load.cuh -- the load of x + residual of any dtypes
//
// Its row is rounded once to Sum; x may first go through functors. The copy engine cannot fetch it,
// so it has no streams (load.cuh).
#pragma once
#include "functor.cuh"
#include "load.cuh"

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
