// forward_ring_streams.cuh -- the tensors of a forward ring: x, or x and a residual
#pragma once
#include "ring_row.cuh"
#include "turns.cuh"

// rereads: see RingRow
template <Tile tile, class Load, bool rereads>
struct ForwardStreams {
  using Held = typename Load::Held;
  using Ring = ForwardRing<tile, Load>;

  const Ring& ring;
  Slice cols;  // of this warp
  RingStream<Held> streams[Load::num_streams];

  __device__ __forceinline__ ForwardStreams(const Ring& ring, const Load& load,
                                            const Turns<tile>& turns, Slice cols)
      : ring(ring), cols(cols) {
#pragma unroll
    for (int stream = 0; stream < Load::num_streams; ++stream) {
      streams[stream] = {load.row_start(turns.first_row, stream) + cols.first_col,
                         load.stride(stream) * turns.step};
    }
  }
  __device__ __forceinline__ typename Ring::Position first() const {
    if constexpr (Load::num_streams == 1) {
      return Ring::first(streams[0]);
    } else {
      return Ring::first(streams[0], streams[1]);
    }
  }
  // Called by one lane: starts the copy of the next row to a slot.
  __device__ __forceinline__ void fetch(int slot) {
    if constexpr (Load::num_streams == 1) {
      ring.fetch(slot, cols.size(), streams[0]);
    } else {
      ring.fetch(slot, cols.size(), streams[0], streams[1]);
    }
  }
  // The warp's part of a row in the ring.
  __device__ __forceinline__ auto row_at(const typename Ring::Position& of) const {
    RingRow<Load, tile, rereads> values{{}, cols};
    values.parts[0] = ring.template part<0, Held>(of, 0);
    if constexpr (Load::num_streams == 2)
      values.parts[1] = ring.template part<1, Held>(of, RingPart<tile, Held>::most_bytes);
    return values;
  }
};
