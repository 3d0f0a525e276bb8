// grid_turns.cuh -- the turns of a group of blocks that share each row: one row a turn
#pragma once
#include "grid_exchange.cuh"

// What the warps of a block do in each turn. sums(turn): of a row's columns of this warp, to all
// its lanes; write(turn, total). There are `lag` turns between them, in which sums arrive.
template <Tile tile, class Value, class Sums, class Write>
__device__ __forceinline__ void take_turns(const GridExchange<Value, tile>& exchange,
                                           long long num_turns, Sums sums, Write write) {
  constexpr int lag = tile.lag();
  if (!GridShape<tile>::works()) {
    exchange.exchange(num_turns);
    return;
  }
  for (long long turn = 0; turn < num_turns + lag; ++turn) {
    if (turn < num_turns) exchange.put(turn, sums(turn));
    if (turn >= lag) write(turn - lag, exchange.total(turn - lag));
  }
}
