// forward_grid.cuh -- the path `grid` of forward_cluster.cu: all blocks of the grid share each row
//
// Weight and bias of a slice stay in the L1 cache, because a block has the same columns of all
// rows.
#pragma once
#include "forward.cuh"
#include "grid_row.cuh"
#include "grid_turns.cuh"

template <bool centered, Tile tile, class Load, class Store>
__device__ __forceinline__ void forward_grid(const Forward<Load, Store>& problem) {
  using X = typename Load::Held;
  using Row = GridRow<X, tile>;
  using Value = typename Either<centered, Moments<float>, Sum<float, 1>>::type;
  constexpr int pack_size = tile.pack_size;

  const GridExchange<Value, tile> exchange(dynamic_smem());
  unsigned char* const places = dynamic_smem() + exchange.smem_bytes;
  const Slice cols = slice<tile>(static_cast<int>(problem.num_cols), blockIdx.x);
  const bool saves = threadIdx.x == 0 && blockIdx.x == 0;
  const float reciprocal = 1.0f / static_cast<float>(problem.num_cols);
  const int num_own_cols = cols_of_warp<tile>(cols);
  const long long num_rows = problem.num_rows;
  const auto row_of = [&](long long row) {
    return Row(problem.load, row, cols, places, Row::kept_bytes);
  };

  const auto sums = [&](long long turn) {
    async_wait<tile.stages - tile.lag() - 1>();
    const Row row = row_of(turn);
    const auto for_each = [&](auto f) {
      for_each_slice_pack<tile, 4>(
          cols, [&](int pack, int col) { return row.load(pack, col); },
          [&](int, int, const Pack<X, pack_size>& loaded) {
            float values[pack_size];
            unpack(loaded, values);
            f(values);
          });
    };
    if constexpr (centered) {
      float origin = 0;
      if (num_own_cols > 0 && threadIdx.x % 32 == 0) {
        float values[pack_size];
        unpack(row.load(0, static_cast<int>(threadIdx.x) * pack_size), values);
        origin = usable_origin(values[0]);
      }
      return warp_moments(__shfl_sync(0xffffffffu, origin, 0), num_own_cols, for_each);
    } else {
      Sum<float, 1> squares{};
      for_each([&](const auto& values) { squares.part[0] += squares_of(values); });
      return warp_reduce<32>(squares);
    }
  };
  struct Loaded {
    Pack<X, pack_size> x;
    decltype(problem.store.template keep<pack_size>(0)) parameters;
  };
  const auto write = [&](long long turn, const Value& total) {
    RowStatistics<float> statistics;
    if constexpr (centered) {
      statistics = of_moments(total, reciprocal, problem.eps);
    } else {
      statistics = uncentered(total.part[0], reciprocal, problem.eps);
    }
    problem.save(turn, statistics, saves);
    const Row row = row_of(turn), later = row.at(problem.load.stride(0) * tile.stages);
    const bool copies = turn + tile.stages < num_rows;
    for_each_slice_pack<tile, 2>(
        cols,
        [&](int pack, int col) {
          return Loaded{row.load(pack, col),
                        problem.store.template keep<pack_size>(cols.first_col + col)};
        },
        [&](int pack, int col, const Loaded& loaded) {
          float values[pack_size], normalized[pack_size];
          unpack(loaded.x, values);
          statistics.template normalize<centered>(values, normalized);
          problem.store.store(turn, cols.first_col + col, normalized, loaded.parameters);
          if (copies) later.copy(pack, col);
        });
    async_commit();
  };

  for (int row = 0; row < tile.stages; ++row) {
    if (exchange.works() && row < num_rows)
      for_each_slice_pack<tile>(cols, [&](int pack, int col) { row_of(row).copy(pack, col); });
    async_commit();
  }
  take_turns<tile>(exchange, num_rows, sums, write);
}
