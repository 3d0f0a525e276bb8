// backward_ring_streams.cuh -- the tensors of a backward ring: x, dy, and what is added to either
#pragma once
#include "backward.cuh"
#include "ring.cuh"
#include "turns.cuh"

// A ring for x and dy, and for what is added to dy or to dx, if anything is.
template <Tile tile, class X, class Dy, class Third, bool has_third>
struct BackwardRing : WarpRing<tile, X, Dy> {
  using WarpRing<tile, X, Dy>::WarpRing;
};
template <Tile tile, class X, class Dy, class Third>
struct BackwardRing<tile, X, Dy, Third, true> : WarpRing<tile, X, Dy, Third> {
  using WarpRing<tile, X, Dy, Third>::WarpRing;
};

template <Tile tile, class LoadX, class LoadDy, class StoreDx, bool adds>
struct BackwardStreams {
  using X = typename LoadX::Held;
  using Dy = typename LoadDy::Held;
  using Third = typename Otherwise<typename LoadDy::Second, typename StoreDx::Added>::type;
  using Compute = typename LoadX::Compute;
  using Shape = RingShape<tile>;
  static constexpr bool has_second = !is_same<typename LoadDy::Second, void>;
  static_assert(!(adds && has_second), "a ring has room for one tensor beside x and dy");
  using Ring = BackwardRing<tile, X, Dy, Third, adds || has_second>;
  static constexpr int third_offset =
      RingOffset<tile, X>::part_bytes + RingOffset<tile, Dy>::part_bytes;

  RingStream<tile, X> x;
  RingStream<tile, Dy> dy;
  RingStream<tile, Third> third;

  // cols: of this warp
  template <class Call>
  __device__ __forceinline__ BackwardStreams(const Call& call, const Turns<tile>& turns, Slice cols)
      : x(call.load_x.row_start(turns.first_row) + cols.first_col,
          call.load_x.x_stride * turns.step),
        dy(call.load_dy.row_start(turns.first_row) + cols.first_col,
           call.load_dy.x_stride * turns.step) {
    if constexpr (adds) {
      third = {call.store.added_start(turns.first_row) + cols.first_col,
               call.store.added_stride() * turns.step};
    }
    if constexpr (has_second) {
      third = {call.load_dy.second_start(turns.first_row) + cols.first_col,
               call.load_dy.second_stride * turns.step};
    }
  }
  // Called by one lane: starts the copy of the next row to a slot.
  __device__ __forceinline__ void fetch(const Ring& ring, int slot, Slice cols) {
    if constexpr (adds || has_second) {
      ring.fetch(slot, cols.size(), x, dy, third);
    } else {
      ring.fetch(slot, cols.size(), x, dy);
    }
  }
  // Called by all lanes: starts the copies of the first rows.
  __device__ __forceinline__ void fetch_first(const Ring& ring, unsigned num_turns, Slice cols) {
    if (threadIdx.x % 32 != 0) return;
    for (int slot = 0; slot < min(static_cast<unsigned>(tile.stages), num_turns); ++slot)
      fetch(ring, slot, cols);
  }
  // f(pack, xs, dys) for each pack of this lane in a slot. is_summed: the row that is summed, else
  // the row that is written
  template <class F>
  __device__ __forceinline__ void for_each_pack(const Ring& ring, int slot, bool is_summed,
                                                F f) const {
    const unsigned char* start = ring.slots + slot * Ring::slot_bytes;
    const X* x_part = x.in(start, is_summed);
    const Dy* dy_part = dy.in(start + RingOffset<tile, X>::part_bytes, is_summed);
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
      Compute xs[tile.pack_size], dys[tile.pack_size];
      unpack(load_pack<tile.pack_size>(x_part + Shape::col(pack)), xs);
      unpack(load_pack<tile.pack_size>(dy_part + Shape::col(pack)), dys);
      if constexpr (has_second) {
        Compute seconds[tile.pack_size];
        const Third* second_part = third.in(start + third_offset, is_summed);
        unpack(load_pack<tile.pack_size>(second_part + Shape::col(pack)), seconds);
#pragma unroll
        for (int at = 0; at < tile.pack_size; ++at) dys[at] += seconds[at];
      }
      f(pack, xs, dys);
    }
  }
  // What is added to pack `pack` of dx of the row that is written.
  __device__ __forceinline__ auto added_pack(const Ring& ring, int slot, int pack) const {
    const Third* part = third.in(ring.slots + slot * Ring::slot_bytes + third_offset, false);
    return load_pack<tile.pack_size>(part + Shape::col(pack));
  }
  // Adds a pack of dx, and what is added to it, to sums over rows.
  template <class Sums>
  __device__ __forceinline__ void add_total(const Ring& ring, int slot, int pack,
                                            const Compute (&dx)[tile.pack_size], Sums& sums) const {
    Compute added[tile.pack_size] = {};
    if constexpr (adds) unpack(added_pack(ring, slot, pack), added);
#pragma unroll
    for (int at = 0; at < tile.pack_size; ++at) sums[at] += adds ? added[at] + dx[at] : dx[at];
  }
  __device__ __forceinline__ void advance_summed() {
    x.summed.advance();
    dy.summed.advance();
    if constexpr (has_second) third.summed.advance();
  }
  __device__ __forceinline__ void advance_written() {
    x.written.advance();
    dy.written.advance();
    if constexpr (adds || has_second) third.written.advance();
  }
};
