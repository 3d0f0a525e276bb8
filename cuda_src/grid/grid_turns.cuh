// grid_turns.cuh -- the turns of a group of blocks that share each row: one row a turn
//
// In each step a worker starts the copies of packs of a later row, writes packs of an earlier row,
// and adds packs of this row to its sums. So copies are always in flight, and no worker waits while
// a row's sums travel. A thread reads only what it has copied itself, so no barrier is needed.
#pragma once
#include "grid_exchange.cuh"
#include "memory.cuh"

// What a worker does with its packs of a row, each in a place of shared memory (GridStream):
//   start()
//   begin_copies<again>(turn), copy<again>(pack, place), load(place) -> Loaded
//   begin_sums(turn), sum(pack, loaded), value()   of the warp, to all its lanes
//   begin_results(turn, exchange), write(turn, pack, loaded)
template <Tile tile, class Value, class Work>
struct GridTurns {
  using Shape = GridShape<tile>;
  using Loaded = typename Work::Loaded;
  static constexpr int num_steps = Shape::num_steps, at_once = Shape::packs_at_once;
  // Packs that come again for their results have places of their own, from `end` on.
  static constexpr bool rereads = Shape::rereads;
  static constexpr int num_slots = rereads ? Shape::in_flight + 1 : tile.stages;
  static constexpr int end = num_slots * at_once * Work::place_bytes;

  const GridExchange<Value, tile>& exchange;
  Work& work;
  long long num_turns;
  int summed = 0, free = 0;  // places of the packs of a step

  __device__ __forceinline__ void run() {
    for (int step = 0; step < Shape::in_flight; ++step) {
      if (exists(step / num_steps)) copy<false>(step / num_steps, step % num_steps, free);
      end_copies();
    }
    work.start();  // while these copies are on their way
    for (long long turn = 0; turn < num_turns + Shape::turns_behind; ++turn) {
      if (turn >= Shape::turns_behind && turn + Shape::turns_ahead < num_turns) {
        take<true>(turn);
      } else {
        take<false>(turn);
      }
    }
  }

 private:
  __device__ __forceinline__ static void advance(int& place) {
    place += at_once * Work::place_bytes;
    if (place == end) place = 0;
  }
  // f(pack, place) of each pack of a step, or f(pack, loaded), whose loads start before the first
  // f.
  template <class F>
  __device__ __forceinline__ void for_each_pack(int step, int first, F f) const {
#pragma unroll
    for (int pack = step * at_once; pack < (step + 1) * at_once; ++pack)
      if (Shape::present(pack, work.cols)) f(pack, first + pack % at_once * Work::place_bytes);
  }
  template <class F>
  __device__ __forceinline__ void for_each_loaded(int step, int first, F f) const {
    Loaded loaded[at_once];
    for_each_pack(step, first,
                  [&](int pack, int place) { loaded[pack % at_once] = work.load(place); });
    for_each_pack(step, first, [&](int pack, int) { f(pack, loaded[pack % at_once]); });
  }
  __device__ __forceinline__ bool exists(long long turn) const {
    return turn >= 0 && turn < num_turns;
  }
  template <bool again>
  __device__ __forceinline__ void copy(long long turn, int step, int first) {
    if (step == 0) work.template begin_copies<again>(turn);
    for_each_pack(step, first,
                  [&](int pack, int place) { work.template copy<again>(pack, place); });
  }
  __device__ __forceinline__ void end_copies() {
    async_commit();
    advance(free);
  }
  // all: whether there is a row for each part of each step.
  template <bool all>
  __device__ __forceinline__ void take(long long turn) {
    constexpr int ahead = Shape::in_flight, lag = Shape::lag;
    if (all || exists(turn)) work.begin_sums(turn);
#pragma unroll
    for (int step = 0; step < num_steps; ++step) {
      const long long row_copied = Shape::template turn_at<ahead>(turn, step);
      if (all || exists(row_copied))
        copy<false>(row_copied, Shape::template step_at<ahead>(step), free);
      if constexpr (rereads) {
        const long long again = Shape::template turn_at<ahead - lag>(turn, step);
        if (all || exists(again))
          copy<true>(again, Shape::template step_at<ahead - lag>(step), end + free);
      }
      end_copies();
      async_wait<ahead>();
      const long long row_written = Shape::template turn_at<-lag>(turn, step);
      if (all || exists(row_written)) {
        const int written = Shape::template step_at<-lag>(step);
        if (written == 0) work.begin_results(row_written, exchange);
        for_each_loaded(written, rereads ? end + free : free, [&](int pack, const Loaded& loaded) {
          work.write(row_written, pack, loaded);
        });
      }
      if (all || exists(turn)) {
        for_each_loaded(step, rereads ? free : summed,
                        [&](int pack, const Loaded& loaded) { work.sum(pack, loaded); });
        if constexpr (!rereads) advance(summed);
      }
    }
    if (all || exists(turn)) exchange.put(turn, work.value());
  }
};

template <Tile tile, class Value, class Work>
__device__ __forceinline__ void take_turns(const GridExchange<Value, tile>& exchange, Work& work,
                                           long long num_turns) {
  if (!GridShape<tile>::works()) return exchange.exchange(num_turns);
  GridTurns<tile, Value, Work>{exchange, work, num_turns}.run();
}
