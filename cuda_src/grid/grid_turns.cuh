// grid_turns.cuh -- the turns of a group of blocks that share each row: one row a turn
//
// A worker takes a row's packs in num_steps steps. In step s, counted over all rows, it
//   prefetches  the packs of step s + in_flight + steps_ahead to the L2 cache
//   copies      the packs of step s + in_flight to shared memory
//   sums        the packs of step s
//   writes      the results of step s - lag, because the sums of that row have arrived
// So memory is always busy, and workers do not wait while sums travel. A thread reads only what it
// has copied itself, so no barrier is needed.
#pragma once
#include "grid_exchange.cuh"
#include "memory.cuh"

// Work is ForwardGrid or BackwardGrid: what a worker does with its packs.
//   cols; streams: a GridStream or GridStreamPair; parameters: a GridKept; steps_ahead, or 0
//   fetch_to_sum(pack), fetch_to_write(pack): parameters that are not kept, early in a step
//   to_sum(pack), to_write(pack) -> parameters
//   begin_sums(turn), sum(pack, loaded, parameters), value() -> of the warp, to all its lanes
//   begin_row(turn) -> Row, finish_row(turn, row, total)
//   write(turn, row, pack, loaded, parameters, sums), sums_of(pack), write_sums(pack, sums, adds)
template <class Work>
struct GridTurns {
  using Shape = typename Work::Shape;
  using Step = typename Shape::Step;
  using Streams = typename Work::Streams;
  static constexpr int num_steps = Shape::num_steps, at_once = Shape::packs_at_once;
  static constexpr int end = Shape::num_slots * at_once * Streams::place_bytes;

  const typename Work::Exchange& exchange;
  Work& work;
  long long num_turns;
  typename Work::Row written_row{};
  int summed_place = 0;
  int free_place = 0;  // whose packs are written in this step, and which the next copies overwrite

  __device__ __forceinline__ void run() {
    for (int step = 0; step < Shape::in_flight; ++step) {
      copy({step / num_steps, step % num_steps}, free_place);
      end_copies();
    }
    for (int step = 0; step < Shape::in_flight + Work::steps_ahead; ++step)  // 0 begins a row
      prefetch({step / num_steps, step % num_steps});
    work.parameters.load_all();  // while these copies are on their way
    for (long long turn = 0; turn < num_turns + Shape::turns_behind; ++turn) take_turn(turn);
#pragma unroll
    for (int pack = 0; pack < Shape::num_packs; ++pack)
      if (Shape::in_slice(pack, work.cols)) work.write_sums(pack, work.sums_of(pack), false);
  }

 private:
  __device__ __forceinline__ static void advance(int& place) {
    place += at_once * Streams::place_bytes;
    if (place == end) place = 0;
  }
  // f(pack, place) for each pack of a step, or f(pack, loaded): all loads start before the first f.
  template <class F>
  __device__ __forceinline__ void for_each_pack(int step, int place, F f) const {
#pragma unroll
    for (int pack = step * at_once; pack < (step + 1) * at_once; ++pack)
      if (Shape::in_slice(pack, work.cols)) f(pack, place + pack % at_once * Streams::place_bytes);
  }
  template <class F>
  __device__ __forceinline__ void for_each_loaded(int step, int place, F f) const {
    typename Streams::Loaded loaded[at_once];
    for_each_pack(step, place,
                  [&](int pack, int place) { loaded[pack % at_once] = work.streams.load(place); });
    for_each_pack(step, place, [&](int pack, int) { f(pack, loaded[pack % at_once]); });
  }
  __device__ __forceinline__ bool exists(long long turn) const {
    return turn >= 0 && turn < num_turns;
  }
  // The packs of a step, if its row exists.
  __device__ __forceinline__ void prefetch(Step of) {
    if (Work::steps_ahead == 0 || !exists(of.turn)) return;
    if (of.step == 0) work.streams.begin_prefetches(of.turn);
    for_each_pack(of.step, 0, [&](int pack, int) { work.streams.prefetch(pack); });
  }
  __device__ __forceinline__ void copy(Step of, int place) {
    if (!exists(of.turn)) return;
    if (of.step == 0) work.streams.begin_copies(of.turn);
    for_each_pack(of.step, place, [&](int pack, int place) { work.streams.copy(pack, place); });
  }
  __device__ __forceinline__ void end_copies() {
    async_commit();
    advance(free_place);
  }
  // The rows that are copied, written and summed in a turn need not exist.
  __device__ __forceinline__ void take_turn(long long turn) {
    constexpr int in_flight = Shape::in_flight, lag = Shape::lag;
    if (exists(turn)) work.begin_sums(turn);
#pragma unroll
    for (int step = 0; step < num_steps; ++step) {
      const Step now{turn, step};
      copy(now.later(in_flight), free_place);
      end_copies();
      prefetch(now.later(in_flight + Work::steps_ahead));
      const Step written = now.later(-lag);
      for_each_pack(step, 0, [&](int pack, int) { work.fetch_to_sum(pack); });
      for_each_pack(written.step, 0, [&](int pack, int) { work.fetch_to_write(pack); });
      async_wait<in_flight>();
      if (exists(turn)) {
        for_each_loaded(step, summed_place, [&](int pack, const auto& loaded) {
          work.sum(pack, loaded, work.to_sum(pack));
        });
        advance(summed_place);
        if (step + 1 == num_steps) exchange.put(turn, work.value());
      }
      if (exists(written.turn)) {
        if (written.step == 0) {
          written_row = work.begin_row(written.turn);  // while the total may be on its way
          work.finish_row(written.turn, written_row, exchange.total(written.turn));
        }
        for_each_loaded(written.step, free_place, [&](int pack, const auto& loaded) {
          auto&& sums = work.sums_of(pack);
          work.write(written.turn, written_row, pack, loaded, work.to_write(pack), sums);
        });
      }
    }
  }
};
