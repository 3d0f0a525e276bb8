// ring_row.cuh -- a warp's part of a row in a slot of the forward ring
//
// ForwardRing    the ring for the tensors that make up a row
// RingRow        the part in a slot, read in each pass
#pragma once
#include "load.cuh"
#include "ring.cuh"

template <Tile tile, class Load>
using ForwardRing = typename Either<Load::num_streams == 1, WarpRing<tile, typename Load::Held>,
                                    WarpRing<tile, typename Load::Held, typename Load::Held>>::type;

// Beyond the part f gets zeros. rereads: whether each pass loads the part again, because other
// values need the registers.
template <class Load, Tile tile, bool rereads = false>
struct RingRow {
  using Held = typename Load::Held;
  using Compute = typename Load::Compute;
  using Shape = RingShape<tile>;
  static constexpr int pack_size = tile.pack_size;
  static constexpr int threads_per_row = 32;  // the lanes that share the part
  static constexpr int num_kept_results = tile.packs_per_thread;
  static constexpr bool has_spare_registers = true;

  const Held* parts[Load::num_streams];
  Slice cols;

  __device__ __forceinline__ int col_of(int pack) const {
    return cols.first_col + Shape::col(pack);
  }
  __device__ __forceinline__ bool in_part(int pack) const { return Shape::in_part(pack, cols); }

  template <class F>
  __device__ __forceinline__ void for_each_pack(F f) const {
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
      Pack<Held, tile.pack_size> packs[Load::num_streams];
#pragma unroll
      for (int stream = 0; stream < Load::num_streams; ++stream) {
        const Held* at = parts[stream] + Shape::col(pack);
        if constexpr (rereads && sizeof(packs[stream]) == 16) {
          smem_reload(at, packs[stream].word);
        } else {
          packs[stream] = load_pack<tile.pack_size>(at);
        }
      }
      Compute values[tile.pack_size];
      unpack(Load::combine(packs), values);
#pragma unroll
      for (Compute& value : values) value = in_part(pack) ? value : Compute(0);
      f(pack, values);
    }
  }
};
