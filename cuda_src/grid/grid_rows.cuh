// grid_rows.cuh -- the warps of a block of path `grid`: those that work, and those that exchange
#pragma once
#include "grid_turns.cuh"
#include "grid_twice.cuh"
#include "warpgroup.cuh"

// Work: ForwardGrid or BackwardGrid. call: Forward or Backward.
template <class Work, class Call>
__device__ __forceinline__ void grid_rows(const Call& call) {
  using Shape = typename Work::Shape;
  const typename Work::Exchange exchange(dynamic_smem());
  const long long num_turns = Shape::num_turns(call.num_rows);
  if (Shape::works()) {
    if constexpr (Shape::gives_registers) take_registers<Shape::worker_registers>();
    Work work(call);
    if constexpr (Shape::keeps_rows) {
      GridTurns<Work>{exchange, work, num_turns}.run();
    } else {
      GridTwice<Work>{exchange, work, num_turns}.run();
    }
  } else {
    if constexpr (Shape::gives_registers) keep_registers<Shape::exchanger_registers>();
    exchange.exchange(num_turns);
  }
}
