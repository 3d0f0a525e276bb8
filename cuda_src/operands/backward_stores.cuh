// backward_stores.cuh -- the stores of backward: dx, dx + another gradient, or dx in parts
//
// adds                      whether another gradient, of type Added, is added to dx
// load_added(row, col)      -> a pack of it; zeros if nothing is added
// added_start(row), added_stride()       for the copy engine, which may fetch its rows instead
// store(row, col, dx, added, present)    adds, rounds once, writes nothing if not present
// written(), written_stride()            the tensor that is written, for kernels that bundle rows
// recomputes                whether y is written again too: load_bias(), recompute(...)
#pragma once
#include "store.cuh"

// dx + dsum. dsum is the gradient that reaches the sum x + residual from elsewhere; Dsum: void if
// there is none.
template <class Dx, class Dsum>
struct DxStore {
  static constexpr bool adds = !is_same<Dsum, void>;
  using Added = typename Otherwise<Dsum, Dx>::type;
  static constexpr bool recomputes = false;
  using LoadBias = LoadParameter<void, false, 0>;

  Dx* dx;
  long long dx_stride;
  const Dsum* dsum;
  long long dsum_stride;

  __device__ __forceinline__ Dx*& written() { return dx; }
  __device__ __forceinline__ long long& written_stride() { return dx_stride; }
  __device__ __forceinline__ const Added* added_start(long long row) const {
    return dsum + row * dsum_stride;
  }
  __device__ __forceinline__ long long added_stride() const { return dsum_stride; }
  template <int pack_size>
  __device__ __forceinline__ Pack<Added, pack_size> load_added(long long row, long long col) const {
    if constexpr (adds) {
      return load_pack<pack_size>(added_start(row) + col);
    } else {
      return {};
    }
  }

  // dx + added, before it is rounded.
  template <int pack_size, class Compute>
  __device__ __forceinline__ static void add(const Compute (&values)[pack_size],
                                             const Pack<Added, pack_size>& added,
                                             Compute (&total)[pack_size]) {
    if constexpr (adds) unpack(added, total);
#pragma unroll
    for (int at = 0; at < pack_size; ++at) total[at] = adds ? total[at] + values[at] : values[at];
  }
  template <int pack_size, class Compute>
  __device__ __forceinline__ void store(long long row, long long col,
                                        const Compute (&values)[pack_size],
                                        const Pack<Added, pack_size>& added, bool present) const {
    Compute total[pack_size];
    add(values, added, total);
    const Pack<Dx, pack_size> rounded = repack<Dx>(total);
    if (present) store_pack<pack_size>(dx + row * dx_stride + col, rounded);
  }
};

// The gradient of a sum of x and a residual, dsum included. dresidual is that gradient (void: not
// wanted); dx is that too, in its own dtype. Each is rounded once.
// Through: DxThroughLoad, where x went through functors: dx is then the gradient of their argument.
template <class Dx, class Dresidual, class Dsum, class Through = Nothing>
struct SplitStore : Through, DxStore<Dx, Dsum> {
  using Base = DxStore<Dx, Dsum>;
  using Base::dx, Base::dx_stride;

  Dresidual* dresidual;
  long long dresidual_stride;

  template <int pack_size, class Compute>
  __device__ __forceinline__ void store(long long row, long long col,
                                        const Compute (&values)[pack_size],
                                        const Pack<typename Base::Added, pack_size>& added,
                                        bool present) const {
    Compute split[pack_size];
    Base::add(values, added, split);
    if constexpr (!is_same<Dresidual, void>) {
      const Pack<Dresidual, pack_size> rounded = repack<Dresidual>(split);
      if (present) store_pack<pack_size>(dresidual + row * dresidual_stride + col, rounded);
    }
    if constexpr (!is_same<Through, Nothing>) Through::apply(row, col, split, present);
    const Pack<Dx, pack_size> rounded = repack<Dx>(split);
    if (present) store_pack<pack_size>(dx + row * dx_stride + col, rounded);
  }
};

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
