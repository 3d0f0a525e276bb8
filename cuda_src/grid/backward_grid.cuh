// backward_grid.cuh -- the path `grid` of backward_cluster.cu: the blocks of a group share each row
//
// A block forms the sums of dweight and dbias of its columns, of all rows of its group. They may be
// dweight and dbias themselves: has_one_group of plan/grids.py.
#pragma once
#include "grid_kept.cuh"
#include "grid_rows.cuh"
#include "grid_stream.cuh"
#include "grid_sums.cuh"

template <Gradients gradients, bool centered, Tile tile, class Call>
struct BackwardGrid {
  using Shape = GridShape<tile>;
  using Value = Sum<float, 2>;
  using Exchange = GridExchange<Value, tile>;
  static constexpr int pack_size = tile.pack_size;
  using Row = RowGradient<float>;
  using Sums = GridPackSums<gradients, pack_size>;
  using Weight = decltype(Call::load_weight);
  using Kept = typename Weight::template Kept<pack_size>;
  using Streams =
      GridStreamPair<decltype(Call::load_x), decltype(Call::load_dy), tile, Exchange::smem_bytes>;
  using Loaded = typename Streams::Loaded;
  static constexpr int steps_ahead = Shape::steps_ahead(Streams::place_bytes);
  static constexpr int packs_in_flight = 4;  // of rows that are read twice
  static constexpr int used_bytes =
      Exchange::smem_bytes + tile.stages * Shape::packs_at_once * Streams::place_bytes;
  static_assert(used_bytes <= Shape::smem_bytes);
  static constexpr int left_registers =
      Shape::spare_registers - Shape::num_packs * Sums::num_registers - (tile.exact ? 8 : 24);

  const Call& call;
  Slice cols;
  Streams streams;
  GridKept<Weight, tile, left_registers, Shape::smem_bytes - used_bytes, 2> parameters;
  Sums sums[Shape::keeps_rows ? Shape::num_packs : 1];
  Row summed, next_summed;
  Value of_row;

  __device__ __forceinline__ explicit BackwardGrid(const Call& call)
      : call(call),
        cols(Shape::cols(call.num_cols)),
        streams(call.load_x, call.load_dy, cols),
        parameters(call.load_weight, cols, dynamic_smem() + used_bytes),
        next_summed(begin_row(0)) {}

  __device__ __forceinline__ void fetch_to_sum(int pack) { parameters.fetch(pack, 1); }
  __device__ __forceinline__ void fetch_to_write(int pack) { parameters.fetch(pack, 0); }
  __device__ __forceinline__ Kept to_sum(int pack) { return parameters.of(pack, 1); }
  __device__ __forceinline__ Kept to_sum_any(int pack) const { return parameters.of_any(pack); }
  __device__ __forceinline__ Kept to_write(int pack) { return parameters.of(pack, 0); }

  // f(x_hat, dy, wdy, at) for each element of a pack.
  template <class F>
  __device__ __forceinline__ static void for_each(const Row& row, const Loaded& loaded,
                                                  const Kept& kept, F f) {
    float xs[pack_size], dys[pack_size], weights[pack_size];
    unpack(loaded.x, xs);
    unpack(loaded.dy, dys);
    Weight::unpack(kept, weights);
#pragma unroll
    for (int at = 0; at < pack_size; ++at)
      f(row.template x_hat<centered>(xs[at]), dys[at], rounded_product(dys[at], weights[at]), at);
  }
  __device__ __forceinline__ void begin_sums(long long turn) {
    summed = next_summed;
    next_summed = begin_row(turn + 1);
    of_row = {};
  }
  __device__ __forceinline__ void sum(int, const Loaded& loaded, const Kept& kept) {
    for_each(summed, loaded, kept, [&](float x_hat, float, float wdy, int) {
      of_row.part[0] += wdy * x_hat;
      if constexpr (centered) of_row.part[1] += wdy;
    });
  }
  __device__ __forceinline__ Value value() const { return warp_reduce<32>(of_row); }

  __device__ __forceinline__ Row begin_row(long long turn) const {
    return call.template gradient_of<centered>(min(Shape::row(turn), call.num_rows - 1));
  }
  __device__ __forceinline__ void finish_row(long long, Row& row, const Value& total) const {
    row.finish(total, 1.0f / static_cast<float>(call.num_cols));
  }
  __device__ __forceinline__ void write(long long turn, const Row& row, int pack,
                                        const Loaded& loaded, const Kept& kept,
                                        Sums& of_pack) const {
    float dx[pack_size];
    for_each(row, loaded, kept, [&](float x_hat, float dy, float wdy, int at) {
      dx[at] = row.template dx<centered>(x_hat, wdy);
      of_pack.add(at, x_hat, dy);
    });
    call.store_dx(Shape::row(turn), cols.first_col + Shape::col(pack), dx);
  }
  __device__ __forceinline__ Sums& sums_of(int pack) { return sums[pack]; }
  __device__ __forceinline__ void write_sums(int pack, const Sums& of_pack, bool adds) const {
    of_pack.write(call, Shape::group() * call.num_cols + cols.first_col + Shape::col(pack), adds);
  }
};
