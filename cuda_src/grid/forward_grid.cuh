// forward_grid.cuh -- the path `grid` of forward_cluster.cu: the blocks of a group share each row
#pragma once
#include "forward.cuh"
#include "grid_kept.cuh"
#include "grid_turns.cuh"

template <bool centered, Tile tile, class Load, class Store>
struct ForwardGrid {
  using X = typename Load::Held;
  using Shape = GridShape<tile>;
  using Value = typename Either<centered, Moments<float>, Sum<float, 1>>::type;
  using Exchange = GridExchange<Value, tile>;
  static constexpr int pack_size = tile.pack_size;
  using Parameters = typename Store::template Kept<pack_size>;
  using Loaded = Pack<X, pack_size>;
  using StreamX = GridStream<X, tile, Exchange::smem_bytes>;
  static constexpr int place_bytes = StreamX::place_bytes;
  static constexpr int used_bytes =
      Exchange::smem_bytes + tile.stages * Shape::packs_at_once * place_bytes;
  static_assert(used_bytes <= Shape::smem_bytes);

  // If all parameters are in registers, a step takes fewer.
  static constexpr int num_registers = Shape::spare_registers + 16;
  static constexpr bool all_fit =
      Shape::num_packs * static_cast<int>(sizeof(Parameters)) <= 4 * num_registers;
  static constexpr int spare_registers = all_fit ? num_registers : Shape::spare_registers;

  const Forward<Load, Store>& call;
  Slice cols;
  StreamX x;
  GridKept<Store, tile, spare_registers, Shape::smem_bytes - used_bytes> parameters;
  float reciprocal, num_own_cols, num_cols_of_warp;
  LaneMoments moments;
  Sum<float, 1> squares;
  RowStatistics<float> statistics;

  __device__ __forceinline__ explicit ForwardGrid(const Forward<Load, Store>& call)
      : call(call),
        cols(Shape::cols(call.num_cols)),
        parameters(call.store, cols, dynamic_smem() + used_bytes),
        reciprocal(1.0f / static_cast<float>(call.num_cols)),
        num_own_cols(static_cast<float>(Shape::num_cols_of(cols, threadIdx.x, 1))),
        num_cols_of_warp(static_cast<float>(Shape::num_cols_of(cols, threadIdx.x / 32 * 32, 32))) {}

  __device__ __forceinline__ void start() { parameters.load_all(); }
  template <bool again>
  __device__ __forceinline__ void begin_copies(long long turn) {
    x.template begin_copies<again>(call.load, turn, cols);
  }
  template <bool again>
  __device__ __forceinline__ void copy(int pack, int place) const {
    x.template copy<again>(pack, place);
  }
  __device__ __forceinline__ Loaded load(int place) const { return x.load(place); }

  __device__ __forceinline__ void begin_sums(long long) {
    moments = {};
    squares = {};
  }
  __device__ __forceinline__ void sum(int pack, const Loaded& loaded) {
    float values[pack_size];
    unpack(loaded, values);
    if constexpr (centered) {
      moments.add(values, pack == 0);
    } else {
      squares.part[0] += squares_of(values);
    }
  }
  __device__ __forceinline__ Value value() const {
    if constexpr (centered) {
      return moments.of_warp(num_own_cols, num_cols_of_warp);
    } else {
      return warp_reduce<32>(squares);
    }
  }

  __device__ __forceinline__ void begin_results(long long turn, const Exchange& exchange) {
    const Value total = exchange.total(turn);
    if constexpr (centered) {
      statistics = of_moments(total, reciprocal, call.eps);
    } else {
      statistics = uncentered(total.part[0], reciprocal, call.eps);
    }
    call.save(Shape::row(turn), statistics, threadIdx.x == 0 && Shape::rank() == 0);
  }
  __device__ __forceinline__ void write(long long turn, int pack, const Loaded& loaded) {
    const int col = Shape::col(pack);
    float values[pack_size], normalized[pack_size];
    unpack(loaded, values);
    statistics.template normalize<centered>(values, normalized);
    call.store.store(Shape::row(turn), cols.first_col + col, normalized, parameters.of(pack));
  }
};

template <bool centered, Tile tile, class Load, class Store>
__device__ __forceinline__ void forward_grid(const Forward<Load, Store>& call) {
  using Grid = ForwardGrid<centered, tile, Load, Store>;
  const typename Grid::Exchange exchange(dynamic_smem());
  Grid grid(call);
  take_turns<tile>(exchange, grid, Grid::Shape::num_turns(call.num_rows));
}
