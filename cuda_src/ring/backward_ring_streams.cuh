// backward_ring_streams.cuh -- the tensors of a backward ring: x, dy, and what is added to dx
#pragma once
#include "backward.cuh"
#include "ring.cuh"
#include "tile.cuh"

// added: to dx, if anything is (adds).
template <Tile tile, class LoadX, class LoadDy, class StoreDx, bool adds>
struct BackwardStreams {
  using X = typename LoadX::Held;
  using Dy = typename LoadDy::Held;
  using Added = typename StoreDx::Added;
  using Compute = typename LoadX::Compute;
  static constexpr int pack_size = tile.pack_size;
  using Ring = typename Either<adds, WarpRing<tile, X, Dy, Added>, WarpRing<tile, X, Dy>>::type;
  using Position = typename Ring::Position;

  const Ring& ring;
  Slice cols;  // of this warp
  RingStream<X> x;
  RingStream<Dy> dy;
  RingStream<Added> added;

  template <class Call>
  __device__ __forceinline__ BackwardStreams(const Ring& ring, const Call& call,
                                             const Turns<tile>& turns, Slice cols)
      : ring(ring), cols(cols) {
    const auto stream = [&](const auto* row_start, long long stride) {
      return RingStream{row_start + cols.first_col, stride * turns.step};
    };
    x = stream(call.load_x.row_start(turns.first_row), call.load_x.x_stride);
    dy = stream(call.load_dy.row_start(turns.first_row), call.load_dy.x_stride);
    if constexpr (adds)
      added = stream(call.store.added_start(turns.first_row), call.store.added_stride());
  }
  __device__ __forceinline__ Position first() const {
    if constexpr (adds) {
      return Ring::first(x, dy, added);
    } else {
      return Ring::first(x, dy);
    }
  }
  // Called by one lane: starts the copy of the next row to a slot.
  __device__ __forceinline__ void fetch(int slot) {
    if constexpr (adds) {
      ring.fetch(slot, cols.size(), x, dy, added);
    } else {
      ring.fetch(slot, cols.size(), x, dy);
    }
  }

  // f(pack, xs, dys) for each pack of this lane of a row in the ring.
  template <class F>
  __device__ __forceinline__ void for_each_pack(const Position& of, F f) const {
    const X* x_part = ring.template part<0, X>(of, 0);
    const Dy* dy_part = ring.template part<1, Dy>(of, RingPart<tile, X>::most_bytes);
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
      const int col = RingShape<tile>::col(pack);
      Compute xs[pack_size], dys[pack_size];
      unpack(load_pack<pack_size>(x_part + col), xs);
      unpack(load_pack<pack_size>(dy_part + col), dys);
      f(pack, xs, dys);
    }
  }
  // What is added to a pack of dx.
  __device__ __forceinline__ Pack<typename StoreDx::Added, pack_size> added_pack(const Position& of,
                                                                                 int pack) const {
    if constexpr (adds) {
      return load_pack<pack_size>(added_part(of) + RingShape<tile>::col(pack));
    } else {
      return {};
    }
  }

 private:
  __device__ __forceinline__ const Added* added_part(const Position& of) const {
    return ring.template part<2, Added>(
        of, RingPart<tile, X>::most_bytes + RingPart<tile, Dy>::most_bytes);
  }
};
