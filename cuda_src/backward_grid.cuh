// backward_grid.cuh -- the path `grid` of backward_cluster.cu: the blocks of a group share each row
//
// A block has the same columns of all rows, so it keeps its sums of dweight and dbias, and there is
// one partial row a group.
#pragma once
#include "backward.cuh"
#include "grid_kept.cuh"
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
  using Shape = GridShape<tile>;
  using Gradient = RowGradient<float>;
  using Sums = GridSums<gradients, tile>;
  using Weight = typename LoadWeight::template Kept<tile.pack_size>;
  constexpr int pack_size = tile.pack_size, packs_at_once = 1;
  constexpr int place_bytes = XRow::kept_bytes + DyRow::kept_bytes;

  const GridExchange<Sum<float, 2>, tile> exchange(dynamic_smem());
  unsigned char* const places = dynamic_smem() + exchange.smem_bytes;
  constexpr int used_bytes = exchange.smem_bytes + tile.stages * place_bytes;
  const Slice cols = Shape::cols(problem.num_cols);
  const float reciprocal = 1.0f / static_cast<float>(problem.num_cols);
  const long long num_turns = Shape::num_turns(problem.num_rows);
  const auto x_of = [&](long long turn) {
    return XRow(problem.load_x, turn, cols, places, place_bytes);
  };
  const auto dy_of = [&](long long turn) {
    return DyRow(problem.load_dy, turn, cols, places + XRow::kept_bytes, place_bytes);
  };
  const auto load_weight = [&](int col) {
    return problem.load_weight.template keep<pack_size>(cols.first_col + col);
  };
  copy_first_rows<tile, packs_at_once>(cols, num_turns, [&](int turn, auto pack, int col) {
    x_of(turn).copy(pack, col);
    dy_of(turn).copy(pack, col);
  });
  // Shared memory that rows leave is for sums, if there are any.
  Sums sums_of_rows(dynamic_smem() + used_bytes, cols);
  KeptOfPacks<Weight, tile, Sums::left_registers, Sums::wanted ? 0 : Shape::smem_bytes - used_bytes>
      weights(dynamic_smem() + used_bytes, cols, load_weight);

  struct Loaded {
    Pack<X, pack_size> x;
    Pack<Dy, pack_size> dy;
    Weight weight;
  };
  // Packs that load at once for the sums of a row: two, if there are registers.
  constexpr int ahead = 2 - (sizeof(Loaded) > 48 || (pack_size > 4 && Shape::spare_registers < 32));
  // f(pack, col, x_hats, dys, wdys) for each pack of a row, for its sums or for its results.
  const auto for_each = [&]<bool for_sums>(long long turn, const Gradient& gradient, auto f) {
    const XRow x = x_of(turn);
    const DyRow dy = dy_of(turn);
    for_each_slice_pack<tile, for_sums ? ahead : packs_at_once>(
        cols,
        [&](auto pack, int col) {
          if constexpr (for_sums) await_pack<tile, packs_at_once>(pack);
          return Loaded{x.load(pack, col), dy.load(pack, col), weights.of(pack, col, load_weight)};
        },
        [&](auto pack, int col, const Loaded& loaded) {
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
          if (!for_sums && turn + tile.stages < num_turns) {
            x.copy_later(pack, col);
            dy.copy_later(pack, col);
          }
        },
        [] {
          if constexpr (!for_sums) async_commit();
        });
  };
  const auto gradient_of = [&](long long row) {
    return Gradient{centered ? problem.mean[row] : 0, problem.rstd[row], 0, 0};
  };
  const auto sums = [&](long long turn) {
    Sum<float, 2> sum{};
    for_each.template operator()<true>(
        turn, gradient_of(Shape::row(turn)),
        [&](auto, int, const auto& x_hats, const auto&, const auto& wdys) {
#pragma unroll
          for (int at = 0; at < pack_size; ++at) {
            sum.part[0] += wdys[at] * x_hats[at];
            if constexpr (centered) sum.part[1] += wdys[at];
          }
        });
    return warp_reduce<32>(sum);
  };
  const auto write = [&](long long turn, const Sum<float, 2>& total) {
    const long long row = Shape::row(turn);
    Gradient gradient = gradient_of(row);
    gradient.finish(total, reciprocal);
    for_each.template operator()<false>(
        turn, gradient,
        [&](auto pack, int col, const auto& x_hats, const auto& dys, const auto& wdys) {
          float dx[pack_size];
#pragma unroll
          for (int at = 0; at < pack_size; ++at)
            dx[at] = gradient.template dx<centered>(x_hats[at], wdys[at]);
          problem.store.store(row, cols.first_col + col, dx);
          sums_of_rows.add(pack, x_hats, dys);
        });
  };
  take_turns<tile>(exchange, num_turns, sums, write);
  sums_of_rows.write(problem);
}
