// store.cuh -- the functors through which a kernel writes y: structs of 8-byte words
// store       store(row, col, values), values in the compute type: applies weight and bias,
//             rounds once
// keep        keep(col) -> Kept: loads the parameters of a pack, to use them in many rows with
//             store(row, col, values, kept, present), which writes nothing if not present
// quantizes   whether it writes 8-bit floats (quantize_store.cuh)
// prefetch_parameters   one block brings what keep loads to the L2 cache
// written     the address of y, for kernels that bundle rows
// A user's own struct may take their place. Offsets are 64-bit. Of backward: backward_stores.cuh.
#pragma once
#include "memory.cuh"
#include "parameter.cuh"
#include "tile.cuh"

// Where a pack is written. present: false beyond the row: it is not written.
struct Place {
  long long row, col;
  bool present;
};

// Whether a store writes f(y), of a user's functor f (functor.cuh).
template <class Store>
constexpr bool has_functor = requires { typename Store::Functor; };

// y = x_hat * weight + bias. Rounded: the element type that x_hat is rounded to before the weight
// multiplies it, as some models define it; void: it is not rounded.
template <class Y, class Weight, class Bias, bool zero_centered, class Rounded = void>
struct Store {
  using Written = Y;
  static constexpr bool quantizes = false, measures_rows = false, has_blocks = false;
  // Whether a block loads its next row before it writes the present one (quantized_row.cuh).
  template <class Load, class Row, Tile tile>
  static constexpr bool fetches_ahead = false;

  Y* y;
  long long y_stride;
  const Weight* weight;
  const Bias* bias;

  __device__ __forceinline__ Y*& written() { return y; }
  // What a kernel that bundles rows keeps.
  template <int pack_size, int num_packs>
  using WeightPairs = KeptPacks<Weight, zero_centered, pack_size, num_packs, 2>;
  template <int pack_size, int num_packs>
  using BiasPairs = KeptPacks<Bias, false, pack_size, num_packs, 2>;

  template <int pack_size>
  struct Kept {
    KeptParameter<Weight, zero_centered, pack_size> weight;
    KeptParameter<Bias, false, pack_size> bias;

    __device__ __forceinline__ void forget_unpacked() {
      weight.forget_unpacked();
      bias.forget_unpacked();
    }
  };
  template <int pack_size>
  __device__ __forceinline__ Kept<pack_size> keep(long long col) const {
    return {{weight, col}, {bias, col}};
  }
  __device__ __forceinline__ void prefetch_parameters(long long num_cols) const {
    prefetch(weight, num_cols);
    prefetch(bias, num_cols);
  }

  // y in the compute type, before it is rounded.
  template <int pack_size, class Compute>
  __device__ __forceinline__ static void affine(const Compute (&values)[pack_size],
                                                const Kept<pack_size>& kept,
                                                Compute (&y_values)[pack_size]) {
    Compute weights[pack_size], biases[pack_size];
    kept.weight.unpack_to(weights, 1.0f);
    kept.bias.unpack_to(biases, 0.0f);
    affine(values, weights, biases, y_values);
  }
  template <int pack_size, class Compute>
  __device__ __forceinline__ static void affine(const Compute (&values)[pack_size],
                                                const Compute (&weights)[pack_size],
                                                const Compute (&biases)[pack_size],
                                                Compute (&y_values)[pack_size]) {
#pragma unroll
    for (int at = 0; at < pack_size; ++at) y_values[at] = values[at];
    if constexpr (!is_same<Rounded, void>) unpack(repack<Rounded>(values), y_values);
    if constexpr (!is_same<Weight, void> || !is_same<Bias, void>) {
#pragma unroll
      for (int at = 0; at < pack_size; ++at) y_values[at] = y_values[at] * weights[at] + biases[at];
    }
  }

  template <int pack_size, class Compute>
  __device__ __forceinline__ void store(long long row, long long col,
                                        const Compute (&values)[pack_size],
                                        const Kept<pack_size>& kept, bool present = true) const {
    Compute weights[pack_size], biases[pack_size];
    kept.weight.unpack_to(weights, 1.0f);
    kept.bias.unpack_to(biases, 0.0f);
    store(row, col, values, weights, biases, present);
  }
  template <int pack_size, class Compute>
  __device__ __forceinline__ void store(long long row, long long col,
                                        const Compute (&values)[pack_size],
                                        const Compute (&weights)[pack_size],
                                        const Compute (&biases)[pack_size], bool present) const {
    Compute y_values[pack_size];
    affine(values, weights, biases, y_values);
    const Pack<Y, pack_size> rounded = repack<Y>(y_values);
    if (present) store_pack<pack_size>(y + row * y_stride + col, rounded);
  }
  template <int pack_size, class Compute>
  __device__ __forceinline__ void store(long long row, long long col,
                                        const Compute (&values)[pack_size]) const {
    store(row, col, values, keep<pack_size>(col));
  }
};

// When forward loads the weight and bias of a row. loads_for(row, store) is what for_each_pack_with
// of a row calls to load them.
//   LateParameters     after the statistics: a thread keeps few of them at a time, and other blocks
//                      hide the latency
//   EarlyParameters    with the row, if tile.early: where rows are few, nothing hides a second
//                      latency
struct LateParameters {
  template <class Row, class Store>
  __device__ __forceinline__ auto loads_for(const Row&, const Store& store) const {
    return [&store](long long col) { return store.template keep<Row::pack_size>(col); };
  }
};

template <class Store, Tile tile>
struct EarlyParameters {
  using Kept = decltype(Store{}.template keep<tile.pack_size>(0));

  Kept kept[tile.packs_per_thread];

  template <class Row>
  __device__ __forceinline__ EarlyParameters(const Row& row, const Store& store) {
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack)
      kept[pack] = store.template keep<tile.pack_size>(row.col(pack));
  }

  // for_each_pack_with loads the packs in their order, each once.
  template <class Row>
  __device__ __forceinline__ auto loads_for(const Row&, const Store&) const {
    return [this, pack = 0](long long) mutable { return kept[pack++]; };
  }
};

// One of the two, made after the loads of the row have started.
template <Tile tile, class Row, class Store>
__device__ __forceinline__ auto row_parameters(const Row& row, const Store& store) {
  if constexpr (tile.early) {
    return EarlyParameters<Store, tile>(row, store);
  } else {
    return LateParameters{};
  }
}
