// forward_ring_scaled.cuh -- the path `ring` where y has 8 bits and its scales depend on the row
//
// y is kept in registers until its scales are known. Those of blocks of columns belong to one warp.
// The scale of a row needs the largest |y| of all warps: y is then written a turn later.
#pragma once
#include "forward_ring.cuh"
#include "quantize_store.cuh"

template <bool centered, Tile tile, class Load, class Store, class Kept, class Largests,
          class Steps>
__device__ __forceinline__ void forward_ring_scaled(const Forward<Load, Store>& call,
                                                    const Kept (&kept)[tile.packs_per_thread],
                                                    const Largests& largests, const Steps& steps) {
  using Compute = typename Load::Compute;
  using Shape = RingShape<tile>;
  using Row = RingRow<Load, tile>;
  constexpr bool crosses_warps = scale_crosses_warps<Store>;
  const Store& store = call.store;
  const auto& [turns, cols, broadcast, saves, sum_row, compute_statistics, for_each_normalized,
               free_slot] = steps;
  Compute results[tile.packs_per_thread][tile.pack_size];
  typename Store::template Scales<Row> scales;
  long long row = turns.first_row;
  const auto place_of = [&](long long of_row, int pack) {
    return Place{of_row, cols.first_col + Shape::col(pack), Shape::in_part(pack, cols)};
  };
  const auto write_results = [&](long long of_row) {
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack)
      store.store_scaled(place_of(of_row, pack), results[pack], scales.of_pack(pack));
  };
  [[maybe_unused]] const auto write_previous = [&](unsigned turn, long long of_row) {
    if constexpr (crosses_warps) {
      largests.wait(turn, Shape::thread() == 0);
      Largest largest{};
      largests.for_each_source(
          [&](int index) { largest.add(__float_as_uint(largests.received(turn, 0, index))); });
      scales.factor = store.scale_of_row({of_row, saves}, warp_reduce<32>(largest).bits());
      write_results(of_row);
    }
  };
  for (unsigned turn = 0; turn < turns.count; ++turn) {
    sum_row(turn + 1);
    if (crosses_warps && turn > 0) write_previous(turn - 1, row - turns.step);
    const auto mean_rstd = receive_statistics<Compute>(broadcast, turn);
    scales = {};
    for_each_normalized(
        row, mean_rstd, [&](int pack, int, const Compute(&normalized)[tile.pack_size]) {
          const Place at = place_of(row, pack);
          y_of_pack<centered>(call, at, normalized, kept[pack], mean_rstd, results[pack]);
          scales.measure(pack, results[pack], at.present);
        });
    free_slot(turn);
    if constexpr (crosses_warps) {
      largests.send_alone(turn, warp_reduce<32>(scales.largest()).part[0]);
    } else {
      store.find_scales_of_blocks({row, saves}, Row{{}, cols}, scales);
      write_results(row);
    }
    compute_statistics(turn + 1);
    row += turns.step;
  }
  if (crosses_warps && turns.count > 0) write_previous(turns.count - 1, row - turns.step);
}
