// forward_grid.cuh -- the path `grid` of forward_cluster.cu: the blocks of a group share each row
#pragma once
#include "forward.cuh"
#include "grid_kept.cuh"
#include "grid_turns.cuh"

template <bool centered, Tile tile, class Load, class Store>
__device__ __forceinline__ void forward_grid(const Forward<Load, Store>& problem) {
  using X = typename Load::Held;
  using Row = GridRow<X, tile>;
  using Shape = GridShape<tile>;
  using Value = typename Either<centered, Moments<float>, Sum<float, 1>>::type;
  using Parameters = decltype(problem.store.template keep<tile.pack_size>(0));
  // Of wide parameters, those of two packs at once would not fit the registers.
  constexpr int pack_size = tile.pack_size, packs_at_once = sizeof(Parameters) > 32 ? 1 : 2;

  const GridExchange<Value, tile> exchange(dynamic_smem());
  unsigned char* const places = dynamic_smem() + exchange.smem_bytes;
  constexpr int used_bytes = exchange.smem_bytes + tile.stages * Row::kept_bytes;
  const Slice cols = Shape::cols(problem.num_cols);
  const bool saves = threadIdx.x == 0 && Shape::rank() == 0;
  const float reciprocal = 1.0f / static_cast<float>(problem.num_cols);
  const int num_own_cols = Shape::cols_of_warp(cols);
  const long long num_turns = Shape::num_turns(problem.num_rows);
  const auto row_of = [&](long long turn) {
    return Row(problem.load, turn, cols, places, Row::kept_bytes);
  };
  const auto load_parameters = [&](int col) {
    return problem.store.template keep<pack_size>(cols.first_col + col);
  };
  copy_first_rows<tile, packs_at_once>(
      cols, num_turns, [&](int turn, auto pack, int col) { row_of(turn).copy(pack, col); });
  KeptOfPacks<Parameters, tile, Shape::spare_registers, Shape::smem_bytes - used_bytes> parameters(
      dynamic_smem() + used_bytes, cols, load_parameters);

  const auto sums = [&](long long turn) {
    const Row row = row_of(turn);
    const auto load = [&](auto pack, int col) {
      await_pack<tile, packs_at_once>(pack);
      return row.load(pack, col);
    };
    const auto for_each = [&](auto f) {
      const auto unpacked = [&](auto, int, const Pack<X, pack_size>& loaded) {
        float values[pack_size];
        unpack(loaded, values);
        f(values);
      };
      for_each_slice_pack<tile, 4>(cols, load, unpacked, [] {});
    };
    if constexpr (centered) {
      float sample[pack_size] = {};  // the first pack of each lane
      const int first_col = static_cast<int>(threadIdx.x) * pack_size;
      const bool samples = first_col < cols.size();
      if (samples) unpack(load(PackNumber<(tile.packs_per_thread > 0)>{0}, first_col), sample);
      return warp_moments(sample, samples, num_own_cols, for_each);
    } else {
      Sum<float, 1> squares{};
      for_each([&](const auto& values) { squares.part[0] += squares_of(values); });
      return warp_reduce<32>(squares);
    }
  };
  struct Loaded {
    Pack<X, pack_size> x;
    Parameters parameters;
  };
  const auto write = [&](long long turn, const Value& total) {
    RowStatistics<float> statistics;
    if constexpr (centered) {
      statistics = of_moments(total, reciprocal, problem.eps);
    } else {
      statistics = uncentered(total.part[0], reciprocal, problem.eps);
    }
    problem.save(Shape::row(turn), statistics, saves);
    const Row row = row_of(turn);
    const bool copies = turn + tile.stages < num_turns;
    for_each_slice_pack<tile, packs_at_once>(
        cols,
        [&](auto pack, int col) {
          return Loaded{row.load(pack, col), parameters.of(pack, col, load_parameters)};
        },
        [&](auto pack, int col, const Loaded& loaded) {
          float values[pack_size], normalized[pack_size];
          unpack(loaded.x, values);
          statistics.template normalize<centered>(values, normalized);
          problem.store.store(Shape::row(turn), cols.first_col + col, normalized,
                              loaded.parameters);
          if (copies) row.copy_later(pack, col);
        },
        [] { async_commit(); });
  };
  take_turns<tile>(exchange, num_turns, sums, write);
}
