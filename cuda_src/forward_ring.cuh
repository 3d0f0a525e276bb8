// forward_ring.cuh -- forward of the rows that pass through shared memory (forward_block.cu, forward_cluster.cu)
//
// While a row is written, the moments of the next one are already on their way to the other warps, one of which will find its
// statistics for all, and the copy engine fetches the rows after it. Each thread keeps its weights and biases from the first
// row to the last. In 8 bits, where scales are sought in the row, y waits in registers: for the largest magnitudes of other
// warps it waits until the row after has been summed up.
#pragma once
#include "forward.cuh"
#include "ring.cuh"

// A ring for the tensors that make up a row.
template <Tile tile, class Load, int num_streams = Load::num_streams>
struct ForwardRing : WarpRing<tile, typename Load::Held> {
  using WarpRing<tile, typename Load::Held>::WarpRing;
};
template <Tile tile, class Load>
struct ForwardRing<tile, Load, 2> : WarpRing<tile, typename Load::Held, typename Load::Held> {
  using WarpRing<tile, typename Load::Held, typename Load::Held>::WarpRing;
};

// The part of a row that lies in a slot. Beyond it f gets zeros. rereads: whether each pass loads it again, as registers hold
// other things meanwhile.
template <class Load, Tile tile, bool rereads = false>
struct RingRow {
  using Held = typename Load::Held;
  using Compute = typename Load::Compute;
  using Shape = RingShape<tile>;
  static constexpr int pack_size = tile.pack_size;
  static constexpr int threads_per_row = 32;  // that share a part
  static constexpr int most_made = tile.packs_per_thread;
  static constexpr bool has_spare_registers = true;

  const Held* parts[Load::num_streams];
  Slice cols;

  __device__ __forceinline__ int col_of(int pack) const { return cols.first_col + Shape::col(pack); }
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

// y of a row, made, that waits in registers for its scales, where they are sought in the row.
template <class Load, class Store, Tile tile, bool measures = Store::quantizes>
struct WaitingRow {
  static constexpr bool has_scales = false, crosses_warps = false;
};
template <class Load, class Store, Tile tile>
struct WaitingRow<Load, Store, tile, true> {
  using Row = RingRow<Load, tile>;
  static constexpr bool has_scales = Store::measures_rows;
  static constexpr bool crosses_warps = has_scales && !Store::has_blocks;

  typename Load::Compute made[tile.packs_per_thread][tile.pack_size];
  typename Store::template Scales<Row> scales;
};

template <class Load, class Store, bool centered, Statistics statistics, Tile tile, class Carried>
__device__ __forceinline__ void forward_ring(const Forward<Load, Store>& problem, unsigned char* smem, Carried& carried) {
  static_assert(tile.stages >= 2, "a row is used for the last time a turn after the next one is waited for");
  using Compute = typename Load::Compute;
  using Held = typename Load::Held;
  using Shape = RingShape<tile>;
  using Ring = ForwardRing<tile, Load>;
  const Ring ring(smem);
  constexpr bool has_rest = centered && statistics == Statistics::two_pass;
  using Sums = Exchange<tile, has_rest ? 3 : 2>;
  using Waiting = WaitingRow<Load, Store, tile>;
  // Constants where y takes the registers of what they are found from (H200, bf16, LayerNorm to 8 bits by the row's scale,
  // 24,576 columns: in two runs 0.64 of a copy without, 0.71 with; level where y does not wait).
  constexpr bool constants = Waiting::has_scales && tile.exact;
  const int num_cols = constants ? tile.cols() * tile.cluster_size : static_cast<int>(problem.num_cols);
  const auto part_of = [&](int source) {
    return constants ? Slice{source * Shape::part_cols, (source + 1) * Shape::part_cols} : Shape::part_of(source, num_cols);
  };
  const Slice cols = part_of(Shape::source());
  const Turns<tile> turns(problem.num_rows, problem.num_first, problem.rows_of_first);
  const bool saves = Shape::thread() == 0 && (tile.cluster_size == 1 || cluster_rank() == 0);

  // Ahead of the rows of all stages, behind which they would arrive microseconds later.
  typename Store::template Kept<tile.pack_size> kept[tile.packs_per_thread];
#pragma unroll
  for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
    if (Shape::in_part(pack, cols)) kept[pack] = problem.store.template keep<tile.pack_size>(cols.first_col + Shape::col(pack));
  }

  RingStream<tile, Held> streams[Load::num_streams];
#pragma unroll
  for (int stream = 0; stream < Load::num_streams; ++stream) {
    streams[stream] = {problem.load.row_start(turns.first_row, stream) + cols.first_col,
                       problem.load.stride(stream) * turns.step};
  }
  const auto fetch = [&](int slot) {
    if constexpr (Load::num_streams == 1) {
      ring.fetch(slot, cols.size(), streams[0]);
    } else {
      ring.fetch(slot, cols.size(), streams[0], streams[1]);
    }
  };
  if (threadIdx.x % 32 == 0) {
    for (int slot = 0; slot < min(static_cast<unsigned>(tile.stages), turns.count); ++slot) fetch(slot);
  }
  unsigned char* const beyond_ring = smem + (Ring::smem_bytes + 15) / 16 * 16;
  const Notice<tile> notice(beyond_ring);
  const Sums exchange(beyond_ring + Notice<tile>::smem_bytes);
  using Largests = Exchange<tile, 1>;
  const auto largests = [&] {
    if constexpr (Waiting::crosses_warps) {
      return Largests(beyond_ring + Notice<tile>::smem_bytes + Sums::smem_bytes);
    } else {
      return Nothing{};
    }
  }();
  ring_sync<tile>();

  const auto in_slot = [&](int slot, bool is_ahead) {
    RingRow<Load, tile, Waiting::crosses_warps> values{{}, cols};
#pragma unroll
    for (int stream = 0; stream < Load::num_streams; ++stream) {
      const unsigned char* part = ring.slots + slot * Ring::slot_bytes + stream * RingOffset<tile, Held>::part_bytes;
      values.parts[stream] = streams[stream].in(part, is_ahead);
    }
    return values;
  };
  // How many columns the warps have that fall to this lane in an exchange.
  Compute source_cols[Sums::sources_per_lane];
#pragma unroll
  for (int index = 0; index < Sums::sources_per_lane; ++index) {
    source_cols[index] = static_cast<Compute>(part_of(Sums::source(index)).size());
  }

  typename Ring::Position ahead, at;
  const auto send_moments = [&](unsigned turn) {
    ring.wait(ahead, cols.size());
    auto values = in_slot(ahead.slot, true);
    const auto [mean, squares, rest] = part_moments<centered, statistics, Held, Compute>(values, cols.size());
    if constexpr (has_rest) exchange.send_third(turn, rest);
    exchange.send(turn, speaks_for_second() ? squares : mean);
    ahead.advance();
    for (auto& stream : streams) stream.ahead.advance();
  };
  // Of the moments that all have sent.
  const auto statistics_of = [&](unsigned turn) {
    const Compute count = static_cast<Compute>(num_cols), reciprocal = Compute(1) / count;
    Sum<Compute, 1> total{};
    exchange.for_each_source([&](int index) {
      total.part[0] += centered ? source_cols[index] * exchange.received(turn, 0, index) : exchange.received(turn, 1, index);
    });
    total = warp_reduce<Sums::lanes>(total);
    if constexpr (!centered) return uncentered(total.part[0], reciprocal, problem.eps);
    const Compute first = divide(total.part[0], count, reciprocal);
    Sum<Compute, 1> deviations{};
    exchange.for_each_source([&](int index) {
      Compute distance = exchange.received(turn, 0, index) - first;
      if constexpr (has_rest) distance += exchange.received(turn, 2, index);
      const Compute weighed = source_cols[index] * distance;
      deviations.part[0] += speaks_for_second() ? exchange.received(turn, 1, index) + weighed * distance : weighed;
    });
    return corrected(first, both_halves(warp_reduce<Sums::lanes>(deviations).part[0]), count, problem.eps);
  };

  // Each row's statistics are found by one of the warps, when it has written the row before: to find them takes a tenth of a
  // row's instructions, and most of that waits.
  int turns_until_mine = Shape::thread() / 32;
  const auto give_notice = [&](unsigned turn) {
    if (turns_until_mine-- > 0) return;
    turns_until_mine = Shape::num_warps - 1;
    const bool is_first = threadIdx.x % 32 == 0;
    exchange.wait(turn, is_first);
    const RowStatistics<Compute> found = statistics_of(turn);
    problem.save(turns.first_row + turn * turns.step, found, is_first && (tile.cluster_size == 1 || cluster_rank() == 0));
    if (is_first) notice.give(turn, make_float4(found.first, found.rstd, found.shift, 0));
  };
  const auto read_notice = [&](unsigned turn) {
    const float4 read = notice.read(turn);
    return RowStatistics<Compute>{0, read.y, read.x, read.z};
  };

  // f(pack, col, normalized) for each pack of the row that is written.
  const auto for_each_normalized = [&](long long row, const auto& found, auto f) {
    in_slot(at.slot, false).for_each_pack([&](int pack, const Compute(&values)[tile.pack_size]) {
      kept[pack].forget_unpacked();
      Compute normalized[tile.pack_size];
      found.template normalize<centered>(values, normalized);
      const int col = cols.first_col + Shape::col(pack);
      problem.load.keep(row, col, values, Shape::in_part(pack, cols));
      f(pack, col, normalized);
    });
  };
  const auto free_slot = [&](unsigned turn) {
    // What was written came from all that was read: the slot is free.
    __syncwarp();
    if (threadIdx.x % 32 == 0 && turn + tile.stages < turns.count) fetch(at.slot);
    at.advance();
    for (auto& stream : streams) stream.at.advance();
  };

  if (turns.count > 0) {
    send_moments(0);
    give_notice(0);
  }
  long long row = turns.first_row;
  if constexpr (Waiting::has_scales) {
    Waiting waiting;
    const auto leave = [&](long long of_row) {
#pragma unroll
      for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
        const int col = cols.first_col + Shape::col(pack);
        problem.store.store_made(of_row, col, waiting.made[pack], waiting.scales.of_pack(pack), Shape::in_part(pack, cols));
      }
    };
    [[maybe_unused]] const auto leave_found = [&](unsigned turn, long long of_row) {
      if constexpr (Waiting::crosses_warps) {
        largests.wait(turn, Shape::thread() == 0);
        Largest largest{};
        largests.for_each_source([&](int index) { largest.add(__float_as_uint(largests.received(turn, 0, index))); });
        waiting.scales.factor = problem.store.scale_of_row(of_row, warp_reduce<32>(largest).bits(), saves);
        leave(of_row);
      }
    };
    for (unsigned turn = 0; turn < turns.count; ++turn) {
      if (turn + 1 < turns.count) send_moments(turn + 1);
      if (Waiting::crosses_warps && turn > 0) leave_found(turn - 1, row - turns.step);
      const auto found = read_notice(turn);
      waiting.scales = {};
      for_each_normalized(row, found, [&](int pack, int, const Compute(&normalized)[tile.pack_size]) {
        problem.store.affine(normalized, kept[pack], waiting.made[pack]);
        waiting.scales.measure(pack, waiting.made[pack], Shape::in_part(pack, cols));
      });
      free_slot(turn);
      if constexpr (Waiting::crosses_warps) {
        largests.send_alone(turn, warp_reduce<32>(waiting.scales.largest()).part[0]);
      } else {
        problem.store.find_scales_of_blocks(row, RingRow<Load, tile>{{}, cols}, waiting.scales);
        leave(row);
      }
      if (turn + 1 < turns.count) give_notice(turn + 1);
      row += turns.step;
    }
    if (Waiting::crosses_warps && turns.count > 0) leave_found(turns.count - 1, row - turns.step);
  } else {
    for (unsigned turn = 0; turn < turns.count; ++turn) {
      if (turn + 1 < turns.count) send_moments(turn + 1);
      const auto found = read_notice(turn);
      for_each_normalized(row, found, [&](int pack, int col, const Compute(&normalized)[tile.pack_size]) {
        if constexpr (Store::quantizes) {
          problem.store.store(row, col, normalized, kept[pack], Shape::in_part(pack, cols), carried);
        } else {
          problem.store.store(row, col, normalized, kept[pack], Shape::in_part(pack, cols));
        }
      });
      free_slot(turn);
      if (turn + 1 < turns.count) give_notice(turn + 1);
      row += turns.step;
    }
  }
}
