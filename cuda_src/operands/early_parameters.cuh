// early_parameters.cuh -- when forward loads the weight and bias of a row
//
// LateParameters     after the statistics: a thread keeps few of them at a time, and other blocks
//                    hide the latency
// EarlyParameters    with the row, if tile.early: where rows are few, nothing hides a second
// latency row_parameters     one of the two, made after the loads of the row have started
//
// loads_for(row, store) is what for_each_pack_with of a row calls to load them.
#pragma once
#include "tile.cuh"

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

template <Tile tile, class Row, class Store>
__device__ __forceinline__ auto row_parameters(const Row& row, const Store& store) {
  if constexpr (tile.early) {
    return EarlyParameters<Store, tile>(row, store);
  } else {
    return LateParameters{};
  }
}
