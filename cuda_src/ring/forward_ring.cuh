// forward_ring.cuh -- the path `ring` of forward_block.cu and forward_cluster.cu
//
// In turn t a warp
//   sums     its part of row t + 1, and sends the moments to the warps that share the row
//   writes   its part of row t, with statistics that one warp of its block has sent to the others
//   fetches  its part of row t + stages to the slot that is free now
//   computes the statistics of row t + 1, if it is this warp's turn to do that for its block
// So moments travel while a row is written, and no barrier stops the block.
#pragma once
#include "forward.cuh"
#include "ring.cuh"
#include "ring_statistics.cuh"

template <Tile tile, class Load>
using ForwardRing = typename Either<Load::num_streams == 1, WarpRing<tile, typename Load::Held>,
                                    WarpRing<tile, typename Load::Held, typename Load::Held>>::type;

// A warp's part of a row in a slot. Beyond the part f gets zeros. rereads: whether each pass loads
// the part again, because other values need the registers.
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

// The tensors of a forward ring: x, or x and a residual. rereads: see RingRow
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

// Whether a scale belongs to the whole row, so its warps exchange their largest |y|.
template <class Store>
constexpr bool scale_crosses_warps = Store::measures_rows && !Store::has_blocks;

// What a warp has, and the steps of a turn.
template <Tile tile, class SumRow, class ComputeStatistics, class ForEachNormalized, class FreeSlot>
struct RingSteps {
  const Turns<tile>& turns;
  const Slice& cols;
  const Broadcast<tile>& broadcast;
  const bool& saves;
  const SumRow& sum_row;
  const ComputeStatistics& compute_statistics;
  const ForEachNormalized& for_each_normalized;
  const FreeSlot& free_slot;
};
// In forward_ring_scaled.cuh, for stores that measure rows. largests: an Exchange<tile, 1>, if the
// warps of a row share a scale.
template <bool centered, Tile tile, class Load, class Store, class Kept, class Largests,
          class Steps>
__device__ __forceinline__ void forward_ring_scaled(const Forward<Load, Store>& call,
                                                    const Kept (&kept)[tile.packs_per_thread],
                                                    const Largests& largests, const Steps& steps);

template <bool centered, Statistics statistics, Tile tile, class Load, class Store>
__device__ __forceinline__ void forward_ring(const Forward<Load, Store>& call) {
  static_assert(tile.stages >= 2, "a row is still in use when the next one is needed");
  using Compute = typename Load::Compute;
  using Shape = RingShape<tile>;
  using Ring = ForwardRing<tile, Load>;
  auto carried = call.template start<tile>();
  unsigned char* const smem = dynamic_smem();
  const Ring ring(smem);
  constexpr bool has_rest = centered && statistics == Statistics::two_pass;
  using MomentExchange = Exchange<tile, has_rest ? 3 : 2>;
  // If y is kept in registers until its scales are known, none are left for num_cols and the parts.
  constexpr bool has_constant_cols = Store::measures_rows && tile.exact;
  const int num_cols =
      has_constant_cols ? tile.cols() * tile.cluster_size : static_cast<int>(call.num_cols);
  const auto part_of = [&](int source) {
    return has_constant_cols ? Slice{source * Shape::part_cols, (source + 1) * Shape::part_cols}
                             : Shape::part_of(source, num_cols);
  };
  const Slice cols = part_of(Shape::source());
  const Turns<tile> turns(call.num_rows, call.num_first, call.rows_of_first);
  const bool saves = Shape::thread() == 0 && (tile.cluster_size == 1 || cluster_rank() == 0);

  // Loaded before the rows of all stages, behind which they would arrive microseconds later.
  typename Store::template Kept<tile.pack_size> kept[tile.packs_per_thread];
#pragma unroll
  for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
    if (Shape::in_part(pack, cols))
      kept[pack] = call.store.template keep<tile.pack_size>(cols.first_col + Shape::col(pack));
  }
  ForwardStreams<tile, Load, scale_crosses_warps<Store>> streams(ring, call.load, turns, cols);
  typename Ring::Position summed = streams.first(), written = summed;
  fetch_first<tile>(streams, turns.count);
  unsigned char* const beyond_ring = smem + (Ring::smem_bytes + 15) / 16 * 16;
  const Broadcast<tile> broadcast(beyond_ring);
  const MomentExchange exchange(beyond_ring + Broadcast<tile>::smem_bytes);
  const auto largests = [&] {
    if constexpr (scale_crosses_warps<Store>) {
      return Exchange<tile, 1>(beyond_ring + Broadcast<tile>::smem_bytes +
                               MomentExchange::smem_bytes);
    } else {
      return Nothing{};
    }
  }();
  ring_sync<tile>();

  Compute source_cols[MomentExchange::sources_per_lane];  // columns of the warps that sent moments
#pragma unroll
  for (int index = 0; index < MomentExchange::sources_per_lane; ++index)
    source_cols[index] = static_cast<Compute>(part_of(MomentExchange::source(index)).size());
  // As compute_statistics below, it does nothing for a turn beyond the last one.
  const auto sum_row = [&](unsigned turn) {
    if (turn >= turns.count) return;
    ring.wait(summed, cols.size());
    auto values = streams.row_at(summed);
    send_moments<centered, statistics, Compute>(exchange, turn, values, cols.size());
    summed.advance();
  };
  // This takes a tenth of a row's instructions. The warps of a block take turns, and the others
  // need not wait for moments.
  int turns_until_own = Shape::thread() / 32;
  const auto compute_statistics = [&](unsigned turn) {
    if (turn >= turns.count || turns_until_own-- > 0) return;
    turns_until_own = Shape::num_warps - 1;
    send_statistics<centered>(call, turns, turn, num_cols, exchange, source_cols, broadcast);
  };

  // f(pack, col, normalized) for each pack of the row that is written in this turn.
  const auto for_each_normalized = [&](long long row, const auto& mean_rstd, auto f) {
    streams.row_at(written).for_each_pack([&](int pack, const Compute(&values)[tile.pack_size]) {
      kept[pack].forget_unpacked();
      Compute normalized[tile.pack_size];
      mean_rstd.template normalize<centered>(values, normalized);
      const int col = cols.first_col + Shape::col(pack);
      call.load.keep(row, col, values, Shape::in_part(pack, cols));
      f(pack, col, normalized);
    });
  };
  const auto free_slot = [&](unsigned turn) {
    // All lanes have written, so all have read: the slot is free.
    __syncwarp();
    if (threadIdx.x % 32 == 0 && turn + tile.stages < turns.count) streams.fetch(written.slot);
    written.advance();
  };
  sum_row(0);
  compute_statistics(0);
  if constexpr (Store::measures_rows) {
    const RingSteps steps{
        turns, cols, broadcast, saves, sum_row, compute_statistics, for_each_normalized, free_slot};
    forward_ring_scaled<centered, tile>(call, kept, largests, steps);
  } else {
    long long row = turns.first_row;
    for (unsigned turn = 0; turn < turns.count; ++turn) {
      sum_row(turn + 1);
      const auto mean_rstd = receive_statistics<Compute>(broadcast, turn);
      for_each_normalized(
          row, mean_rstd, [&](int pack, int col, const Compute(&normalized)[tile.pack_size]) {
            call.template write_pack<centered>({row, col, Shape::in_part(pack, cols)}, normalized,
                                               kept[pack], mean_rstd, carried);
          });
      free_slot(turn);
      compute_statistics(turn + 1);
      row += turns.step;
    }
  }
  call.finish(carried);
}
