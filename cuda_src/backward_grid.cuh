// backward_grid.cuh -- the path `grid` of backward_cluster.cu: all blocks of the grid share each
// row
//
// A block has the same columns of all rows, so it keeps its sums of dweight and dbias in shared
// memory, and there is one partial row.
#pragma once
#include "backward.cuh"
#include "grid_sums.cuh"
#include "grid_turns.cuh"

template <Gradients gradients, bool centered, Tile tile, class LoadX, class LoadDy,
          class LoadWeight, class StoreDx>
__device__ __forceinline__ void backward_grid(
    const Backward<LoadX, LoadDy, LoadWeight, StoreDx>& problem) {
  using X = typename LoadX::Held;
  using Dy = typename LoadDy::Held;
  using XRow = GridRow<X, tile>;
  using DyRow = GridRow<Dy, tile>;
  using Gradient = RowGradient<float>;
  constexpr int pack_size = tile.pack_size;
  constexpr int place_bytes = XRow::kept_bytes + DyRow::kept_bytes;

  const GridExchange<Sum<float, 2>, tile> exchange(dynamic_smem());
  unsigned char* const places = dynamic_smem() + exchange.smem_bytes;
  const Slice cols = slice<tile>(static_cast<int>(problem.num_cols), blockIdx.x);
  const GridSums<gradients, tile> sums_of_rows(places + tile.stages * place_bytes, cols);
  const float reciprocal = 1.0f / static_cast<float>(problem.num_cols);
  const long long num_rows = problem.num_rows;
  const auto x_of = [&](long long row) {
    return XRow(problem.load_x, row, cols, places, place_bytes);
  };
  const auto dy_of = [&](long long row) {
    return DyRow(problem.load_dy, row, cols, places + XRow::kept_bytes, place_bytes);
  };
  const auto gradient_of = [&](long long row) {
    Gradient gradient{};
    if constexpr (centered) gradient.mean = problem.mean[row];
    gradient.rstd = problem.rstd[row];
    return gradient;
  };
  struct Loaded {
    Pack<X, pack_size> x;
    Pack<Dy, pack_size> dy;
    typename LoadWeight::template Kept<pack_size> weight;
  };
  // f(pack, col, x_hats, dys, wdys) for each pack of a row. ahead: see for_each_slice_pack.
  const auto for_each = [&]<int ahead>(long long turn, const Gradient& gradient, auto f) {
    const XRow x = x_of(turn);
    const DyRow dy = dy_of(turn);
    for_each_slice_pack<tile, ahead>(
        cols,
        [&](int pack, int col) {
          return Loaded{x.load(pack, col), dy.load(pack, col),
                        problem.load_weight.template keep<pack_size>(cols.first_col + col)};
        },
        [&](int pack, int col, const Loaded& loaded) {
          float x_hats[pack_size], dys[pack_size], wdys[pack_size];
          unpack(loaded.x, x_hats);
          unpack(loaded.dy, dys);
          problem.load_weight.unpack(loaded.weight, wdys);
#pragma unroll
          for (int at = 0; at < pack_size; ++at) {
            x_hats[at] = gradient.template x_hat<centered>(x_hats[at]);
            wdys[at] = rounded_product(dys[at], wdys[at]);
          }
          f(pack, col, x_hats, dys, wdys);
        });
  };

  const auto sums = [&](long long turn) {
    async_wait<tile.stages - tile.lag() - 1>();
    Sum<float, 2> sum{};
    for_each.template operator()<2>(
        turn, gradient_of(turn), [&](int, int, const auto& x_hats, const auto&, const auto& wdys) {
#pragma unroll
          for (int at = 0; at < pack_size; ++at) {
            sum.part[0] += wdys[at] * x_hats[at];
            if constexpr (centered) sum.part[1] += wdys[at];
          }
        });
    return warp_reduce<32>(sum);
  };
  const auto write = [&](long long turn, const Sum<float, 2>& total) {
    Gradient gradient = gradient_of(turn);
    gradient.finish(total, reciprocal);
    // The row that takes this one's place.
    const XRow later_x = x_of(turn).at(problem.load_x.stride(0) * tile.stages);
    const DyRow later_dy = dy_of(turn).at(problem.load_dy.stride(0) * tile.stages);
    const bool copies = turn + tile.stages < num_rows;
    for_each.template operator()<1>(
        turn, gradient,
        [&](int pack, int col, const auto& x_hats, const auto& dys, const auto& wdys) {
          float dx[pack_size];
#pragma unroll
          for (int at = 0; at < pack_size; ++at)
            dx[at] = gradient.template dx<centered>(x_hats[at], wdys[at]);
          problem.store.store(turn, cols.first_col + col, dx);
          sums_of_rows.add(col, x_hats, dys);
          if (copies) {
            later_x.copy(pack, col);
            later_dy.copy(pack, col);
          }
        });
    async_commit();
  };

  if (exchange.works()) sums_of_rows.start();
  for (int row = 0; row < tile.stages; ++row) {
    if (exchange.works() && row < num_rows)
      for_each_slice_pack<tile>(cols, [&](int pack, int col) {
        x_of(row).copy(pack, col);
        dy_of(row).copy(pack, col);
      });
    async_commit();
  }
  take_turns<tile>(exchange, num_rows, sums, write);
  if (exchange.works()) sums_of_rows.write(problem.dweight_partials, problem.dbias_partials);
}
