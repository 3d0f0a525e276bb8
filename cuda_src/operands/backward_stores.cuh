// backward_stores.cuh -- the stores of dx that add or split; recomputing_store.cuh writes y again
//
// Store without parameters writes dx alone. The stores of backward have more members than store.cuh
// names:
//   adds         whether a gradient of type Added is added to dx. Then the copy engine may fetch
//                its rows: added_start(row), added_stride(), store(row, col, values, fetched,
//                present)
//   recomputes   whether y is written again beside dx: load_bias() -> LoadBias, which reads the
//                bias; recompute(row, col, x_hats, weights, biases, present)
#pragma once
#include "dropout.cuh"
#include "functor_gradient.cuh"
#include "store.cuh"

// dx + dsum, rounded once. dsum is the gradient that reaches the sum x + residual from elsewhere.
template <class Dx, class Dsum>
struct AddStore : WritesDxAlone {
  using Added = Dsum;
  static constexpr bool adds = true;

  Dx* dx;
  long long dx_stride;
  const Dsum* dsum;
  long long dsum_stride;

  __device__ __forceinline__ Dx*& written() { return dx; }
  __device__ __forceinline__ long long& written_stride() { return dx_stride; }
  __device__ __forceinline__ const Dsum* added_start(long long row) const {
    return dsum + row * dsum_stride;
  }
  __device__ __forceinline__ long long added_stride() const { return dsum_stride; }

  template <int pack_size, class Compute>
  __device__ __forceinline__ void store(long long row, long long col,
                                        const Compute (&values)[pack_size],
                                        const Pack<Dsum, pack_size>& fetched,
                                        bool present = true) const {
    Compute added[pack_size];
    unpack(fetched, added);
#pragma unroll
    for (int at = 0; at < pack_size; ++at) added[at] += values[at];
    const Pack<Dx, pack_size> rounded = repack<Dx>(added);
    if (present) store_pack<pack_size>(dx + row * dx_stride + col, rounded);
  }
  template <int pack_size, class Compute>
  __device__ __forceinline__ void store(long long row, long long col,
                                        const Compute (&values)[pack_size],
                                        bool present = true) const {
    Pack<Dsum, pack_size> fetched{};
    if (present) fetched = load_pack<pack_size>(added_start(row) + col);
    store(row, col, values, fetched, present);
  }
};

// The gradient of a sum of a residual and a scaled x. It includes dsum, which reaches the sum from
// elsewhere (void: none). dresidual is that gradient (void: not wanted); dx is that gradient times
// the factor of forward. Each is rounded once. Through: DxThroughLoad, where x went through a
// functor.
template <class Dx, class Dresidual, class Dsum, class RowScale, bool drops,
          class Through = NoFunctor>
struct SplitStore : WritesDxAlone, Through {
  static constexpr bool adds = !is_same<Dsum, void>;
  using Added = typename Otherwise<Dsum, Dx>::type;

  Dx* dx;
  long long dx_stride;
  const Dsum* dsum;
  long long dsum_stride;
  Dresidual* dresidual;
  long long dresidual_stride;
  Factor<RowScale, drops> factor;

  __device__ __forceinline__ const Added* added_start(long long row) const {
    return dsum + row * dsum_stride;
  }
  __device__ __forceinline__ long long added_stride() const { return dsum_stride; }

  template <int pack_size, class Compute>
  __device__ __forceinline__ void store(long long row, long long col,
                                        const Compute (&values)[pack_size],
                                        const Pack<Added, pack_size>& fetched,
                                        bool present = true) const {
    Compute split[pack_size];
    if constexpr (adds) unpack(fetched, split);
#pragma unroll
    for (int at = 0; at < pack_size; ++at) split[at] = adds ? split[at] + values[at] : values[at];
    if constexpr (!is_same<Dresidual, void>) {
      const Pack<Dresidual, pack_size> rounded = repack<Dresidual>(split);
      if (present) store_pack<pack_size>(dresidual + row * dresidual_stride + col, rounded);
    }
    factor.multiply(row, col, split, present);
    if constexpr (!is_same<Through, NoFunctor>) Through::apply(row, col, split, present);
    const Pack<Dx, pack_size> rounded = repack<Dx>(split);
    if (present) store_pack<pack_size>(dx + row * dx_stride + col, rounded);
  }
  template <int pack_size, class Compute>
  __device__ __forceinline__ void store(long long row, long long col,
                                        const Compute (&values)[pack_size],
                                        bool present = true) const {
    Pack<Added, pack_size> fetched{};
    if constexpr (adds) {
      if (present) fetched = load_pack<pack_size>(added_start(row) + col);
    }
    store(row, col, values, fetched, present);
  }
};
