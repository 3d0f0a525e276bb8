// functor.cuh -- a user's own element-wise functor in the loads and stores of forward
//
// The user's lines become a struct that is compiled with the kernel (dispatch/functor_text.py):
//   apply(row, col, values, other)   values = f(values), a pack in the compute type; other(col) is
//                                    the value of another column of the row, before f
// Its gradient: functor_gradient.cuh.
//
// random_word    random bits of an element
// Chain          several functors, one after another; only the first may read other columns
// RowArray       an array that a functor reads
// FunctorLoad    f(x), kept in the compute type; SumLoad (sum_load.cuh) adds a residual to it
// FunctorStore   f(y) after weight and bias, before y is rounded
#pragma once
#include "load.cuh"
#include "statistics.cuh"
#include "store.cuh"

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011: "Parallel random numbers: as easy as 1, 2, 3"),
// with the seed as its key. Word col % 4 of the counter (col / 4, row) is that of (row, col). So it
// does not depend on tile or strategy, and backward computes it again.
// cupynorm.reference.dropout_mask is the same in NumPy.
struct Random4 {
  unsigned word[4];

  // word[at], by selects: an index would put the words in local memory.
  __device__ __forceinline__ unsigned pick(int at) const {
    const unsigned even = at & 2 ? word[2] : word[0], odd = at & 2 ? word[3] : word[1];
    return at & 1 ? odd : even;
  }
};

__device__ __forceinline__ Random4 philox(unsigned long long key, unsigned long long low,
                                          unsigned long long high) {
  unsigned counter[4] = {static_cast<unsigned>(low), static_cast<unsigned>(low >> 32),
                         static_cast<unsigned>(high), static_cast<unsigned>(high >> 32)};
  unsigned first_key = static_cast<unsigned>(key), second_key = static_cast<unsigned>(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned long long first = 0xD2511F53ull * counter[0],
                             second = 0xCD9E8D57ull * counter[2];
    counter[0] = static_cast<unsigned>(second >> 32) ^ counter[1] ^ first_key;
    counter[1] = static_cast<unsigned>(second);
    counter[2] = static_cast<unsigned>(first >> 32) ^ counter[3] ^ second_key;
    counter[3] = static_cast<unsigned>(first);
    first_key += 0x9E3779B9u;
    second_key += 0xBB67AE85u;
  }
  return {{counter[0], counter[1], counter[2], counter[3]}};
}

// Four columns share one counter, and the compiler computes it once for those of a pack.
__device__ __forceinline__ unsigned random_word(long long seed, long long row, long long col) {
  return philox(seed, static_cast<unsigned long long>(col) / 4, row)
      .pick(static_cast<int>(col) & 3);
}

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

  // y_values = f(y_values), of a row with these statistics. call: a Forward.
  template <bool centered, class Call, int pack_size, class Compute>
  __device__ __forceinline__ void apply(const Call& call, const Place& at,
                                        Compute (&y_values)[pack_size],
                                        const RowStatistics<Compute>& mean_rstd) const {
    if (!at.present) return;  // the arrays have no such row or column
    const OtherY<centered, decltype(call.load), FunctorStore, RowStatistics<Compute>> other{
        call.load, call.store, mean_rstd, at.row};
    functor.apply(at.row, at.col, y_values, other);
  }
  // The same, and writes it to `to`, the address of the pack.
  template <bool centered, class Call, int pack_size, class Compute>
  __device__ __forceinline__ void finish(const Call& call, const Place& at, Y* to,
                                         Compute (&y_values)[pack_size],
                                         const RowStatistics<Compute>& mean_rstd) const {
    apply<centered>(call, at, y_values, mean_rstd);
    if (at.present) store_pack<pack_size>(to, repack<Y>(y_values));
  }
};
