// forward_ring_streams.cuh -- what a forward ring loads: parameters once, rows through the ring
#pragma once
#include "ring_row.cuh"
#include "turns.cuh"

// Loads the weights and biases that a thread keeps from the first row to the last.
template <Tile tile, class Store, class Kept>
__device__ __forceinline__ void keep_parameters(const Store& store, Slice cols,
                                                Kept (&kept)[tile.packs_per_thread]) {
  using Shape = RingShape<tile>;
#pragma unroll
  for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
    if (Shape::in_part(pack, cols))
      kept[pack] = store.template keep<tile.pack_size>(cols.first_col + Shape::col(pack));
  }
}

// The tensors that make up a row. rereads: see RingRow
template <Tile tile, class Load, bool rereads>
struct ForwardStreams {
  using Held = typename Load::Held;
  using Ring = ForwardRing<tile, Load>;

  RingStream<tile, Held> streams[Load::num_streams];

  // cols: of this warp
  __device__ __forceinline__ ForwardStreams(const Load& load, const Turns<tile>& turns,
                                            Slice cols) {
#pragma unroll
    for (int stream = 0; stream < Load::num_streams; ++stream) {
      streams[stream] = {load.row_start(turns.first_row, stream) + cols.first_col,
                         load.stride(stream) * turns.step};
    }
  }
  // Called by one lane: starts the copy of the next row to a slot.
  __device__ __forceinline__ void fetch(const Ring& ring, int slot, Slice cols) {
    if constexpr (Load::num_streams == 1) {
      ring.fetch(slot, cols.size(), streams[0]);
    } else {
      ring.fetch(slot, cols.size(), streams[0], streams[1]);
    }
  }
  // The warp's part of the row in a slot. is_summed: the row that is summed, else the row that is
  // written
  __device__ __forceinline__ auto in_slot(const Ring& ring, int slot, Slice cols,
                                          bool is_summed) const {
    RingRow<Load, tile, rereads> values{{}, cols};
#pragma unroll
    for (int stream = 0; stream < Load::num_streams; ++stream) {
      const unsigned char* part =
          ring.slots + slot * Ring::slot_bytes + stream * RingOffset<tile, Held>::part_bytes;
      values.parts[stream] = streams[stream].in(part, is_summed);
    }
    return values;
  }
  __device__ __forceinline__ void advance_summed() {
    for (auto& stream : streams) stream.summed.advance();
  }
  __device__ __forceinline__ void advance_written() {
    for (auto& stream : streams) stream.written.advance();
  }
};
