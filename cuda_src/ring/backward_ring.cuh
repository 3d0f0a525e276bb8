// backward_ring.cuh -- the path `ring` of backward_block.cu and backward_cluster.cu
//
// In turn t a warp
//   sums     its part of row t + 1, and sends the sums to the warps that share the row
//   waits    for all sums of row t, and adds them up
//   writes   dx of its part of row t, whose slot is then free
//   fetches  its part of row t + stages to that slot
// Each thread keeps its weights, and its sums of dweight and dbias, from the first row to the last.
#pragma once
#include "backward.cuh"
#include "backward_ring_inputs.cuh"
#include "exchange.cuh"
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

template <Gradients gradients, bool centered, Tile tile, class LoadX, class LoadDy,
          class LoadWeight, class StoreDx>
__device__ __forceinline__ void backward_ring(
    const Backward<LoadX, LoadDy, LoadWeight, StoreDx>& call) {
  using Compute = typename LoadX::Compute;
  using Shape = RingShape<tile>;
  constexpr bool adds = StoreDx::adds && gradients.dx;
  using Streams = BackwardStreams<tile, LoadX, LoadDy, StoreDx, adds>;
  using Ring = typename Streams::Ring;
  constexpr int pack_size = tile.pack_size;
  const Slice cols = Shape::part(static_cast<int>(call.num_cols));
  const Turns<tile> turns(call.num_rows);
  unsigned char* const smem = dynamic_smem();
  const Ring ring(smem);
  unsigned char* parameters = smem + (Ring::smem_bytes + Exchange<tile>::smem_bytes + 15) / 16 * 16;

  // Loaded before the rows of all stages, behind which they would arrive microseconds later.
  constexpr bool recomputes = StoreDx::recomputes;
  RingParameters<LoadWeight, tile, gradients.dx || recomputes> weights(call.load_weight, cols,
                                                                       parameters);
  typename StoreDx::LoadBias load_bias{};
  if constexpr (recomputes) load_bias = call.store.load_bias();
  RingParameters<typename StoreDx::LoadBias, tile, recomputes> biases(
      load_bias, cols, parameters + decltype(weights)::smem_bytes);
  // mean and rstd of a row are loaded two turns before its dx is written.
  const auto gradient_of = [&](unsigned turn) {
    return call.template gradient_of<centered>(
        min(turns.first_row + turn * turns.step, call.num_rows - 1));
  };
  RowGradient<Compute> gradient = gradient_of(0), next = gradient_of(1);

  Streams streams(ring, call, turns, cols);
  typename Ring::Position summed = streams.first(), written = summed;
  fetch_first<tile>(streams, turns.count);
  const Exchange<tile> exchange(smem + Ring::smem_bytes);
  weights.store_to_smem();
  biases.store_to_smem();
  using Sums = Compute[tile.packs_per_thread][pack_size];
  Sums dweight = {}, dbias = {};
  ring_sync<tile>();
  const auto sum_row = [&](unsigned turn, const RowGradient<Compute>& gradient) {
    ring.wait(summed, cols.size());
    Sum<Compute, 2> sums{};
    streams.for_each_pack(summed, [&](int pack, const auto& xs, const auto& dys) {
      Compute weight_values[pack_size];
      weights.unpack_to(pack, weight_values);
      const bool present = Shape::in_part(pack, cols);
      sums.merge(sum_pack<gradients, centered>(dweight[pack], dbias[pack], xs, dys, weight_values,
                                               gradient, present));
    });
    if constexpr (gradients.dx) exchange.send(turn, warp_reduce_two(sums.part[0], sums.part[1]));
    summed.advance();
  };
  const auto write_row = [&](long long row) {
    streams.for_each_pack(written, [&](int pack, const auto& xs, const auto& dys) {
      Compute weight_values[pack_size];
      weights.unpack_to(pack, weight_values);
      const int col = cols.first_col + Shape::col(pack);
      const bool present = Shape::in_part(pack, cols);
      if constexpr (gradients.dx) {
        Compute dx[pack_size];
        gradient.template dx_of_pack<centered>(dx, xs, dys, weight_values);
        call.store.store(row, col, dx, streams.added_pack(written, pack), present);
      }
      if constexpr (recomputes) {
        Compute bias_values[pack_size];
        biases.unpack_to(pack, bias_values);
        call.template recompute<centered>(gradient, row, col, xs, weight_values, bias_values,
                                          present);
      }
    });
  };
  const Compute reciprocal = Compute(1) / static_cast<Compute>(call.num_cols);
  // The sums of the next row travel while this row is written, unless only one row fits.
  constexpr bool overlaps = tile.stages > 1;
  if (overlaps && turns.count > 0) sum_row(0, gradient);
  long long row = turns.first_row;
  for (unsigned turn = 0; turn < turns.count; ++turn) {
    const RowGradient<Compute> following = gradient_of(turn + 2);
    if constexpr (overlaps) {
      if (turn + 1 < turns.count) sum_row(turn + 1, next);
    } else {
      sum_row(turn, gradient);
    }
    if constexpr (gradients.dx) {
      exchange.wait(turn, Shape::thread() == 0);
      gradient.finish(exchange.total(exchange.buffer(turn)), reciprocal);
    }
    if constexpr (gradients.dx || recomputes) write_row(row);
    // All lanes have written, so all have read: the slot is free.
    __syncwarp();
    if (threadIdx.x % 32 == 0 && turn + tile.stages < turns.count) streams.fetch(written.slot);
    written.advance();
    row += turns.step;
    gradient = next;
    next = following;
  }
  store_ring_sums<gradients, tile>(call, ring, dweight, dbias, cols);
}
