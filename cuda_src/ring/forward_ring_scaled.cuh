// forward_ring_scaled.cuh -- the path `ring` where y has 8 bits and its scales depend on the row
//
// y is kept in registers until its scales are known. Those of blocks of columns belong to one warp.
// The scale of a row needs the largest |y| of all warps: y is then written a turn later.
//
// KeptResults            y and its scales
// forward_ring_scaled    the turns of a warp
#pragma once
#include "forward_ring.cuh"
#include "ring_statistics.cuh"

// Empty unless the scales of a row are found before it is written.
//   has_scales      they are: y is kept in registers until then
//   crosses_warps   a scale belongs to the whole row, so its warps exchange their largest |y|
template <class Load, class Store, Tile tile, bool measures = Store::quantizes>
struct KeptResults {
  static constexpr bool has_scales = false, crosses_warps = false;
};
template <class Load, class Store, Tile tile>
struct KeptResults<Load, Store, tile, true> {
  using Row = RingRow<Load, tile>;
  static constexpr bool has_scales = Store::measures_rows;
  static constexpr bool crosses_warps = has_scales && !Store::has_blocks;

  typename Load::Compute results[tile.packs_per_thread][tile.pack_size];
  typename Store::template Scales<Row> scales;
};

// Where the warps that share a row exchange their largest |y|, if they share its scale.
template <class Results, Tile tile>
__device__ __forceinline__ auto exchange_of_largest(unsigned char* smem) {
  if constexpr (Results::crosses_warps) {
    return Exchange<tile, 1>(smem);
  } else {
    return Nothing{};
  }
}

// The steps of a turn of a forward ring (forward_ring.cuh).
template <class SumRow, class ComputeStatistics, class ForEachNormalized, class FreeSlot>
struct RingSteps {
  const SumRow& sum_row;
  const ComputeStatistics& compute_statistics;
  const ForEachNormalized& for_each_normalized;
  const FreeSlot& free_slot;
  const bool& saves;
};

// largests: of Exchange<tile, 1>, if the warps of a row share a scale.
template <bool centered, Tile tile, class Load, class Store, class Kept, class Largests,
          class Steps>
__device__ __forceinline__ void forward_ring_scaled(const Forward<Load, Store>& call,
                                                    const Turns<tile>& turns, Slice cols,
                                                    const Kept (&kept)[tile.packs_per_thread],
                                                    const Broadcast<tile>& broadcast,
                                                    const Largests& largests, const Steps& steps) {
  using Compute = typename Load::Compute;
  using Shape = RingShape<tile>;
  using Results = KeptResults<Load, Store, tile>;
  const Store& store = call.store;
  Results kept_row;
  long long row = turns.first_row;
  const auto write_results = [&](long long of_row) {
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
      const int col = cols.first_col + Shape::col(pack);
      store.store_scaled(of_row, col, kept_row.results[pack], kept_row.scales.of_pack(pack),
                         Shape::in_part(pack, cols));
    }
  };
  [[maybe_unused]] const auto write_previous = [&](unsigned turn, long long of_row) {
    if constexpr (Results::crosses_warps) {
      largests.wait(turn, Shape::thread() == 0);
      Largest largest{};
      largests.for_each_source(
          [&](int index) { largest.add(__float_as_uint(largests.received(turn, 0, index))); });
      kept_row.scales.factor =
          store.scale_of_row(of_row, warp_reduce<32>(largest).bits(), steps.saves);
      write_results(of_row);
    }
  };
  for (unsigned turn = 0; turn < turns.count; ++turn) {
    steps.sum_row(turn + 1);
    if (Results::crosses_warps && turn > 0) write_previous(turn - 1, row - turns.step);
    const auto mean_rstd = receive_statistics<Compute>(broadcast, turn);
    kept_row.scales = {};
    steps.for_each_normalized(
        row, mean_rstd, [&](int pack, int col, const Compute(&normalized)[tile.pack_size]) {
          call.template result<centered>(row, col, normalized, kept[pack],
                                         Shape::in_part(pack, cols), mean_rstd,
                                         kept_row.results[pack]);
          kept_row.scales.measure(pack, kept_row.results[pack], Shape::in_part(pack, cols));
        });
    steps.free_slot(turn);
    if constexpr (Results::crosses_warps) {
      largests.send_alone(turn, warp_reduce<32>(kept_row.scales.largest()).part[0]);
    } else {
      store.find_scales_of_blocks(row, RingRow<Load, tile>{{}, cols}, kept_row.scales);
      write_results(row);
    }
    steps.compute_statistics(turn + 1);
    row += turns.step;
  }
  if (Results::crosses_warps && turns.count > 0) write_previous(turns.count - 1, row - turns.step);
}
