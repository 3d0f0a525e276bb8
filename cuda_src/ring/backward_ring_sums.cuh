// backward_ring_sums.cuh -- the end of a backward ring: a block's or cluster's row of partial sums
#pragma once
#include "backward.cuh"
#include "ring.cuh"

// Groups of threads add their sums in pairs, through the shared memory of their rings; the first
// group writes the total. ring: of this warp, no longer in use.
template <Gradients gradients, Tile tile, class Ring, class Call, class Compute>
__device__ __forceinline__ void store_ring_sums(
    const Call& call, const Ring& ring, Compute (&dweight)[tile.packs_per_thread][tile.pack_size],
    Compute (&dbias)[tile.packs_per_thread][tile.pack_size], Slice cols) {
  using Shape = RingShape<tile>;
  constexpr int pack_size = tile.pack_size;
  constexpr int packs_per_thread = tile.packs_per_thread;
  auto* sums = reinterpret_cast<Compute*>(ring.slots);
  const auto for_each_sum = [&](auto f) {
#pragma unroll
    for (int pack = 0; pack < packs_per_thread; ++pack) {
      if constexpr (gradients.dweight) f(call.dweight_partials, dweight[pack], pack);
      if constexpr (gradients.dbias) f(call.dbias_partials, dbias[pack], packs_per_thread + pack);
    }
  };
  for (int groups = tile.rows_per_block; groups > 1; groups = (groups + 1) / 2) {
    const int kept = (groups + 1) / 2;
    if (Shape::group() >= kept && Shape::group() < groups) {
      for_each_sum([&](Compute*, Compute(&values)[pack_size], int at) {
        store_pack<pack_size>(sums + Shape::col(at), repack<Compute>(values));
      });
    }
    __syncthreads();
    if (Shape::group() + kept < groups) {
      const Compute* others =
          sums + kept * Shape::num_warps * (Ring::ring_bytes / static_cast<int>(sizeof(Compute)));
      for_each_sum([&](Compute*, Compute(&values)[pack_size], int at) {
        Compute other[pack_size];
        unpack(load_pack<pack_size>(others + Shape::col(at)), other);
#pragma unroll
        for (int index = 0; index < pack_size; ++index) values[index] += other[index];
      });
    }
  }
  if (Shape::group() > 0) return;
  const long long offset = blockIdx.x / tile.cluster_size * call.num_cols + cols.first_col;
  for_each_sum([&](Compute* partials, Compute(&values)[pack_size], int at) {
    const int pack = at % packs_per_thread;
    if (Shape::in_part(pack, cols))
      store_pack<pack_size>(partials + offset + Shape::col(pack), repack<Compute>(values));
  });
}
