// grid_turns.cuh -- the turns of a grid whose blocks share each row: one row a turn
#pragma once
#include "grid_exchange.cuh"

// What all warps of a block do in each turn. sums(turn): of a row's columns of this warp, to all
// its lanes; write(turn, total). There are `lag` turns between them, in which sums arrive.
template <Tile tile, class Value, class Sums, class Write>
__device__ __forceinline__ void take_turns(const GridExchange<Value, tile>& exchange,
                                           long long num_turns, Sums sums, Write write) {
  constexpr int lag = tile.lag();
  for (long long turn = 0; turn < num_turns + lag; ++turn) {
    if (exchange.works() && turn < num_turns) exchange.put(turn, sums(turn));
    __syncthreads();  // now the sums of this turn have been put, and totals have been received
    if (exchange.works()) {
      if (turn >= lag) write(turn - lag, exchange.total(turn - lag));
    } else if (exchange.sends()) {
      if (turn < num_turns) exchange.send(turn);
    } else if (turn + 1 >= lag && turn + 1 < num_turns + lag) {
      exchange.receive(turn + 1 - lag);
      if (turn + 2 == num_turns + lag) exchange.leave(num_turns);
    }
  }
}
