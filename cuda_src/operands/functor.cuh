// functor.cuh -- a user's own element-wise functor in the loads and stores of forward
//
// The user's lines become a struct that is compiled with the kernel (cupynorm/plan/functors.py):
//   apply(row, col, values, other)   values = f(values), a pack in the compute type; other(col) is
//                                    the value of another column of the row, before f
// Its gradient: functor_gradient.cuh.
//
// Chain          several functors, one after another; only the first may read other columns
// RowArray       an array that a functor reads
// FunctorLoad    f(x), kept in the compute type; SumLoad (sum_load.cuh) adds a residual to it
// FunctorStore   f(y) after weight and bias, before y is rounded
#pragma once
#include "load.cuh"
#include "random.cuh"

// How a functor's array is read along a row.
enum class Reach {
  packs,     // as packs: its address and stride are aligned to them
  elements,  // one element at a time
  row,       // one element for all columns
  own_row,   // the same, where each row of x has one: repeat and period are not read
};

// Row `row` of x reads row `row / repeat % period` of the array.
template <class T, Reach reach>
struct RowArray {
  const T* start;
  long long row_stride;
  long long repeat;
  long long period;

  template <int pack_size, class C>
  __device__ __forceinline__ void load(long long row, long long col, C (&values)[pack_size]) const {
    if constexpr (reach != Reach::own_row) {
      if (repeat > 1) row /= repeat;
      if (row >= period) row %= period;
    }
    const T* own = start + row * row_stride;
    if constexpr (reach == Reach::packs) {
      unpack(load_pack<pack_size>(own + col), values);
    } else {
#pragma unroll
      for (int at = 0; at < pack_size; ++at)
        values[at] = load_element<C>(reach == Reach::elements ? own + col + at : own);
    }
  }
};

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

template <class First, class Then>
struct Chain {
  First first;
  Then then;

  template <int pack_size, class C, class At>
  __device__ __forceinline__ void apply(long long row, long long col, C (&values)[pack_size],
                                        const At& other) const {
    first.apply(row, col, values, other);
    then.apply(row, col, values, Nothing{});
  }
};

template <class X, class Functor>
struct FunctorLoad : Functor {
  using Compute = typename ComputeOf<X>::type;
  using Held = Compute;
  static constexpr bool has_effect = false;

  const X* x;
  long long x_stride;

  template <int pack_size>
  __device__ __forceinline__ Pack<Held, pack_size> load(long long row, long long col) const {
    const X* row_start = x + row * x_stride;
    Compute values[pack_size];
    unpack(load_pack<pack_size>(row_start + col), values);
    Functor::apply(row, col, values, OtherX<X, Compute>{row_start});
    return repack<Held>(values);
  }
};

// Base: Store (store.cuh).
template <class Base, class OwnFunctor>
struct FunctorStore : Base {
  using Functor = OwnFunctor;
  using Y = typename Base::Written;

  Functor functor;

  // Writes f(y_values) to `to`, the place of the pack, unless present is false.
  template <int pack_size, class Compute, class Other>
  __device__ __forceinline__ void finish(long long row, long long col, Y* to,
                                         Compute (&y_values)[pack_size], const Other& other,
                                         bool present) const {
    if (!present) return;  // the arrays have no such row or column
    functor.apply(row, col, y_values, other);
    store_pack<pack_size>(to, repack<Y>(y_values));
  }
};

template <class Store>
constexpr bool has_functor = requires { typename Store::Functor; };
