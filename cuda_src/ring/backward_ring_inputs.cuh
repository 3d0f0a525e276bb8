// backward_ring_inputs.cuh -- what a backward ring reads: x, dy, what is added to dx, and weights
#pragma once
#include "backward.cuh"
#include "parameter.cuh"
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

// If there are many packs, the first of each thread are in shared memory and the others in
// registers. used: false if the kernel needs no parameters.
template <class Load, Tile tile, bool used>
struct RingParameters {
  using Shape = RingShape<tile>;
  using Kept = typename Load::template Kept<tile.pack_size>;
  static constexpr bool in_smem_too =
      used && Load::present && tile.pack_size * tile.packs_per_thread > 16;
  // All packs of wide weights. One pack of 16-bit weights remains in registers: that makes room for
  // a third stage.
  static constexpr int smem_packs =
      in_smem_too ? tile.packs_per_thread - (sizeof(Kept) <= 2 * tile.pack_size) : 0;
  static constexpr int smem_bytes = smem_packs * tile.threads_per_row * sizeof(Kept);

  Kept* in_smem;  // [smem_packs][threads_per_row], shared by all rows of the block
  Kept in_registers[tile.packs_per_thread - smem_packs + (smem_packs == tile.packs_per_thread)];
  Kept for_smem[smem_packs + 1];  // only until they are written to shared memory

  // Starts the loads. store_to_smem() ends them.
  __device__ __forceinline__ RingParameters(const Load& load, Slice cols, unsigned char* smem)
      : in_smem(reinterpret_cast<Kept*>(smem) + Shape::thread()) {
    if constexpr (!used) return;
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
      Kept kept{};
      if (Shape::in_part(pack, cols))
        kept = load.template keep<tile.pack_size>(cols.first_col + Shape::col(pack));
      if (pack < smem_packs) {
        for_smem[pack] = kept;
      } else {
        in_registers[pack - smem_packs] = kept;
      }
    }
  }
  // Called before ring_sync.
  __device__ __forceinline__ void store_to_smem() const {
    if constexpr (!used) return;
    if (Shape::group() > 0) return;
#pragma unroll
    for (int pack = 0; pack < smem_packs; ++pack)
      in_smem[pack * tile.threads_per_row] = for_smem[pack];
  }
  template <class Compute>
  __device__ __forceinline__ void unpack_to(int pack, Compute (&values)[tile.pack_size]) {
    if constexpr (!used) return;
    if (pack < smem_packs) {
      Load::unpack(in_smem[pack * tile.threads_per_row], values);
    } else {
      in_registers[pack - smem_packs].forget_unpacked();
      Load::unpack(in_registers[pack - smem_packs], values);
    }
  }
};
