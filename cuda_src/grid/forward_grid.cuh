// forward_grid.cuh -- the path `grid` of forward_cluster.cu: the blocks of a group share each row
#pragma once
#include "forward.cuh"
#include "grid_kept.cuh"
#include "grid_rows.cuh"
#include "grid_stream.cuh"

template <bool centered, Tile tile, class Load, class Store>
struct ForwardGrid {
  using X = typename Load::Held;
  using Shape = GridShape<tile>;
  using Value = typename Either<centered, Moments<float>, Sum<float, 1>>::type;
  using Exchange = GridExchange<Value, tile>;
  static constexpr int pack_size = tile.pack_size;
  using Kept = typename Store::template Kept<pack_size>;
  using Loaded = Pack<X, pack_size>;
  using Row = RowStatistics<float>;
  using Sums = Nothing;
  static constexpr int place_bytes = Shape::step * static_cast<int>(sizeof(X));
  static constexpr int packs_in_flight = 8;  // of rows that are read twice
  static constexpr int used_bytes =
      Exchange::smem_bytes + tile.stages * Shape::packs_at_once * place_bytes;
  static_assert(used_bytes <= Shape::smem_bytes);

  // If all parameters are in registers, a step takes fewer.
  static constexpr bool all_fit =
      Shape::num_packs * static_cast<int>(sizeof(Kept)) <= 4 * (Shape::spare_registers + 16);
  static constexpr int spare_registers = Shape::spare_registers + (all_fit ? 16 : 0);
  using Parameters = GridKept<Store, tile, spare_registers,
                              Shape::keeps_rows ? Shape::smem_bytes - used_bytes : 0>;
  // If some are fetched, they stay in the L2 cache, and rows leave it first.
  using Streams = GridStream<Load, tile, Exchange::smem_bytes, Parameters::fetches>;
  static_assert(Streams::place_bytes == place_bytes);
  // Rows whose parameters are fetched are slower with prefetches, also with those that leave the
  // L2 cache first. Packs of less than 16 bytes are limited by instructions.
  static constexpr int steps_ahead =
      sizeof(Loaded) == 16 && !Parameters::fetches ? Shape::steps_ahead(place_bytes) : 0;

  const Forward<Load, Store>& call;
  Slice cols;
  Streams streams;
  Parameters parameters;
  float reciprocal, num_own_cols, num_cols_of_warp;
  LaneMoments moments;
  Sum<float, 1> squares;

  __device__ __forceinline__ explicit ForwardGrid(const Forward<Load, Store>& call)
      : call(call),
        cols(Shape::cols(call.num_cols)),
        streams(call.load, cols),
        parameters(call.store, cols, dynamic_smem() + used_bytes),
        reciprocal(1.0f / static_cast<float>(call.num_cols)),
        num_own_cols(static_cast<float>(Shape::num_cols_of(cols, threadIdx.x, 1))),
        num_cols_of_warp(static_cast<float>(Shape::num_cols_of(cols, threadIdx.x / 32 * 32, 32))) {}

  __device__ __forceinline__ void fetch_to_sum(int) {}
  __device__ __forceinline__ void fetch_to_write(int pack) { parameters.fetch(pack, 0); }
  __device__ __forceinline__ Nothing to_sum(int) const { return {}; }
  __device__ __forceinline__ Nothing to_sum_any(int) const { return {}; }
  __device__ __forceinline__ Kept to_write(int pack) { return parameters.of(pack, 0); }

  __device__ __forceinline__ void begin_sums(long long) {
    moments = {};
    squares = {};
  }
  __device__ __forceinline__ void sum(int pack, const Loaded& loaded, Nothing) {
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

  __device__ __forceinline__ Row begin_row(long long) const { return {}; }
  __device__ __forceinline__ void finish_row(long long turn, Row& row, const Value& total) const {
    if constexpr (centered) {
      row = of_moments(total, reciprocal, call.eps);
    } else {
      row = uncentered(total.part[0], reciprocal, call.eps);
    }
    call.save(Shape::row(turn), row, threadIdx.x == 0 && Shape::rank() == 0);
  }
  __device__ __forceinline__ void write(long long turn, const Row& row, int pack,
                                        const Loaded& loaded, const Kept& kept, Nothing&) const {
    float values[pack_size], normalized[pack_size];
    unpack(loaded, values);
    row.template normalize<centered>(values, normalized);
    const int col = cols.first_col + Shape::col(pack);
    if constexpr (Parameters::fetches) {
      call.store.store_once(Shape::row(turn), col, normalized, kept);
    } else {
      call.store.store(Shape::row(turn), col, normalized, kept, true);
    }
  }
  __device__ __forceinline__ Nothing sums_of(int) const { return {}; }
  __device__ __forceinline__ void write_sums(int, const Nothing&, bool) const {}
};
