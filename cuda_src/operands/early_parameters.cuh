// early_parameters.cuh -- when forward loads the weight and bias of a row
//
// After the statistics: a thread keeps few of them at a time, and other blocks hide the latency.
// With the row, if tile.early: where rows are few, nothing hides a second latency.
#pragma once
#include "tile.cuh"

struct LateParameters {
  // -> load(col), for for_each_pack_with of a row
  template <class Row, class Store>
  __device__ __forceinline__ auto loads_for(const Row&, const Store& store) const {
    return [&store](long long col) { return store.template keep<Row::pack_size>(col); };
  }
};

// Made after the loads of the row have started.
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

template <Tile tile, class Row, class Store>
__device__ __forceinline__ auto early_parameters(const Row& row, const Store& store) {
  if constexpr (tile.early) {
    return EarlyParameters<Store, tile>(row, store);
  } else {
    return LateParameters{};
  }
}
