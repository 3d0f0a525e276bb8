// grid_turns.cuh -- the turns of a group of blocks that share each row: one row a turn
//
// A worker takes a row's packs in num_steps steps. In step s, counted over all rows, it
//   copies  the packs of step s + in_flight to shared memory
//   writes  the results of step s - lag, as the sums of that row have arrived
//   sums    the packs of step s
// So copies are always in flight, and no worker waits while sums travel. A thread reads only what
// it has copied itself: no barrier is needed. If the packs of lag steps do not fit (rereads), they
// are copied again, in_flight steps before they are written.
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
  // Packs that are copied again have places of their own, from `end` on.
  static constexpr bool rereads = Shape::rereads;
  static constexpr int num_slots = rereads ? Shape::in_flight + 1 : tile.stages;
  static constexpr int end = num_slots * at_once * Work::place_bytes;

  const GridExchange<Value, tile>& exchange;
  Work& work;
  long long num_turns;
  int summed_place = 0, free_place = 0;  // free: of what is written, then replaced by copies

  __device__ __forceinline__ void run() {
    for (int step = 0; step < Shape::in_flight; ++step) {
      if (exists(step / num_steps)) copy<false>(step / num_steps, step % num_steps, free_place);
      end_copies();
    }
    work.start();  // while these copies are on their way
    for (long long turn = 0; turn < num_turns + Shape::turns_behind; ++turn) {
      if (turn >= Shape::turns_behind && turn + Shape::turns_ahead < num_turns) {
        take_turn<true>(turn);
      } else {
        take_turn<false>(turn);
      }
    }
  }

 private:
  __device__ __forceinline__ static void advance(int& place) {
    place += at_once * Work::place_bytes;
    if (place == end) place = 0;
  }
  // f(pack, place) for each pack of a step, or f(pack, loaded): all loads start before the first f.
  template <class F>
  __device__ __forceinline__ void for_each_pack(int step, int place, F f) const {
#pragma unroll
    for (int pack = step * at_once; pack < (step + 1) * at_once; ++pack)
      if (Shape::present(pack, work.cols)) f(pack, place + pack % at_once * Work::place_bytes);
  }
  template <class F>
  __device__ __forceinline__ void for_each_loaded(int step, int place, F f) const {
    Loaded loaded[at_once];
    for_each_pack(step, place,
                  [&](int pack, int place) { loaded[pack % at_once] = work.load(place); });
    for_each_pack(step, place, [&](int pack, int) { f(pack, loaded[pack % at_once]); });
  }
  __device__ __forceinline__ bool exists(long long turn) const {
    return turn >= 0 && turn < num_turns;
  }
  template <bool again>
  __device__ __forceinline__ void copy(long long turn, int step, int place) {
    if (step == 0) work.template begin_copies<again>(turn);
    for_each_pack(step, place,
                  [&](int pack, int place) { work.template copy<again>(pack, place); });
  }
  __device__ __forceinline__ void end_copies() {
    async_commit();
    advance(free_place);
  }
  // all: whether all rows that are copied, written and summed in this turn exist.
  template <bool all>
  __device__ __forceinline__ void take_turn(long long turn) {
    constexpr int in_flight = Shape::in_flight, lag = Shape::lag;
    if (all || exists(turn)) work.begin_sums(turn);
#pragma unroll
    for (int step = 0; step < num_steps; ++step) {
      const long long copied = Shape::template turn_at<in_flight>(turn, step);
      if (all || exists(copied))
        copy<false>(copied, Shape::template step_at<in_flight>(step), free_place);
      if constexpr (rereads) {
        const long long again = Shape::template turn_at<in_flight - lag>(turn, step);
        if (all || exists(again))
          copy<true>(again, Shape::template step_at<in_flight - lag>(step), end + free_place);
      }
      end_copies();
      async_wait<in_flight>();
      const long long written = Shape::template turn_at<-lag>(turn, step);
      if (all || exists(written)) {
        const int step_written = Shape::template step_at<-lag>(step);
        if (step_written == 0) work.begin_results(written, exchange);
        for_each_loaded(step_written, rereads ? end + free_place : free_place,
                        [&](int pack, const Loaded& loaded) { work.write(written, pack, loaded); });
      }
      if (all || exists(turn)) {
        for_each_loaded(step, rereads ? free_place : summed_place,
                        [&](int pack, const Loaded& loaded) { work.sum(pack, loaded); });
        if constexpr (!rereads) advance(summed_place);
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
