// backward_grid.cuh -- the path `grid` of backward_cluster.cu: the blocks of a group share each row
//
// A block keeps its sums of dweight and dbias, of the same columns of all rows: one partial row a
// group.
#pragma once
#include "grid_kept.cuh"
#include "grid_sums.cuh"
#include "grid_turns.cuh"

template <Gradients gradients, bool centered, Tile tile, class Call>
struct BackwardGrid {
  using X = typename decltype(Call::load_x)::Held;
  using Dy = typename decltype(Call::load_dy)::Held;
  using Shape = GridShape<tile>;
  using Value = Sum<float, 2>;
  using Exchange = GridExchange<Value, tile>;
  using Sums = GridSums<gradients, tile>;
  static constexpr int pack_size = tile.pack_size;
  struct Loaded {
    Pack<X, pack_size> x;
    Pack<Dy, pack_size> dy;
  };
  using StreamX = GridStream<X, tile, Exchange::smem_bytes>;
  using StreamDy = GridStream<Dy, tile, StreamX::last_byte>;
  static constexpr int place_bytes = StreamX::place_bytes + StreamDy::place_bytes;
  static constexpr int used_bytes =
      Exchange::smem_bytes + Sums::smem_bytes + tile.stages * Shape::packs_at_once * place_bytes;
  static_assert(used_bytes <= Shape::smem_bytes);

  const Call& call;
  Slice cols;
  StreamX x;
  StreamDy dy;
  Sums sums;
  GridKept<decltype(Call::load_weight), tile, Sums::left_registers, Shape::smem_bytes - used_bytes>
      weights;
  RowGradient<float> summed, written, next_summed;  // of the rows in these states
  Value of_row;

  __device__ __forceinline__ explicit BackwardGrid(const Call& call)
      : call(call),
        cols(Shape::cols(call.num_cols)),
        sums(dynamic_smem() + used_bytes - Sums::smem_bytes),
        weights(call.load_weight, cols, dynamic_smem() + used_bytes),
        next_summed(gradient_of(0)) {}
  __device__ __forceinline__ RowGradient<float> gradient_of(long long turn) const {
    return call.template gradient_of<centered>(min(Shape::row(turn), call.num_rows - 1));
  }
  __device__ __forceinline__ void start() { weights.load_all(); }
  template <bool again>
  __device__ __forceinline__ void begin_copies(long long turn) {
    x.template begin_copies<again>(call.load_x, turn, cols);
    dy.template begin_copies<again>(call.load_dy, turn, cols);
  }
  template <bool again>
  __device__ __forceinline__ void copy(int pack, int place) const {
    x.template copy<again>(pack, place);
    dy.template copy<again>(pack, place);
  }
  __device__ __forceinline__ Loaded load(int place) const {
    return {x.load(place), dy.load(place)};
  }

  template <class F>  // f(x_hats, dys, wdys) of a pack
  __device__ __forceinline__ void with_pack(const RowGradient<float>& gradient, int pack,
                                            const Loaded& loaded, F f) {
    float x_hats[pack_size], dys[pack_size], wdys[pack_size];
    unpack(loaded.x, x_hats);
    unpack(loaded.dy, dys);
    call.load_weight.unpack(weights.of(pack), wdys);
#pragma unroll
    for (int at = 0; at < pack_size; ++at) {
      x_hats[at] = gradient.template x_hat<centered>(x_hats[at]);
      wdys[at] = rounded_product(dys[at], wdys[at]);
    }
    f(x_hats, dys, wdys);
  }
  __device__ __forceinline__ void begin_sums(long long turn) {
    summed = next_summed;
    next_summed = gradient_of(turn + 1);
    of_row = {};
  }
  __device__ __forceinline__ void sum(int pack, const Loaded& loaded) {
    with_pack(summed, pack, loaded, [&](const auto& x_hats, const auto&, const auto& wdys) {
#pragma unroll
      for (int at = 0; at < pack_size; ++at) {
        of_row.part[0] += wdys[at] * x_hats[at];
        if constexpr (centered) of_row.part[1] += wdys[at];
      }
    });
  }
  __device__ __forceinline__ Value value() const { return warp_reduce<32>(of_row); }
  __device__ __forceinline__ void begin_results(long long turn, const Exchange& exchange) {
    written = gradient_of(turn);  // loads while the total may still be on its way
    written.finish(exchange.total(turn), 1.0f / static_cast<float>(call.num_cols));
  }
  __device__ __forceinline__ void write(long long turn, int pack, const Loaded& loaded) {
    with_pack(written, pack, loaded, [&](const auto& x_hats, const auto& dys, const auto& wdys) {
      float dx[pack_size];
#pragma unroll
      for (int at = 0; at < pack_size; ++at)
        dx[at] = written.template dx<centered>(x_hats[at], wdys[at]);
      call.store_dx(Shape::row(turn), cols.first_col + Shape::col(pack), dx);
      sums.add(pack, x_hats, dys);
    });
  }
};

template <Gradients gradients, bool centered, Tile tile, class Call>
__device__ __forceinline__ void backward_grid(const Call& call) {
  using Grid = BackwardGrid<gradients, centered, tile, Call>;
  const typename Grid::Exchange exchange(dynamic_smem());
  Grid grid(call);
  take_turns<tile>(exchange, grid, Grid::Shape::num_turns(call.num_rows));
  grid.sums.write(call, grid.cols);
}
