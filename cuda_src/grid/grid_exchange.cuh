// grid_exchange.cuh -- sums over all warps of all blocks of a group, some turns later
//
// In each turn every worker warp of a block puts a value. One of the num_exchangers other warps
// adds these, exchanges the sum with other blocks (grid_words.cuh), and publishes the total to the
// workers. The block needs no barrier, and its workers may be a few turns ahead.
#pragma once
#include "bulk.cuh"
#include "grid_words.cuh"

template <class Value, Tile tile>
struct GridExchange {
  using Shape = GridShape<tile>;
  static constexpr int num_warps = Shape::num_warps;
  // A slot has the values of one turn. It is used again after grid_slots turns (grid_words.cuh).
  static constexpr int smem_bytes =
      (grid_slots * (16 + Value::size * (num_warps + 1) * 4) + 15) / 16 * 16;
  static_assert(num_warps <= 32);

  unsigned long long* all_put;    // [grid_slots] barriers: all warps have put their values
  unsigned long long* published;  // [grid_slots] barriers: the total is there
  float* values;                  // [grid_slots][Value::size][num_warps]
  float* totals;                  // [grid_slots][Value::size]
  GridWords<Value, tile> words;

  __device__ __forceinline__ explicit GridExchange(unsigned char* smem)
      : all_put(reinterpret_cast<unsigned long long*>(smem)),
        published(all_put + grid_slots),
        values(reinterpret_cast<float*>(published + grid_slots)),
        totals(values + grid_slots * Value::size * num_warps) {
    if (threadIdx.x == 0) {
      for (int slot = 0; slot < grid_slots; ++slot) {
        bulk_barrier_init(all_put + slot, num_warps);
        bulk_barrier_init(published + slot, 1);
      }
    }
    __syncthreads();
  }

  // Called by all lanes of a worker warp, with the same value.
  __device__ __forceinline__ void put(unsigned turn, const Value& value) const {
    if (threadIdx.x % 32 != 0) return;
    const int slot = turn % grid_slots;
#pragma unroll
    for (int at = 0; at < Value::size; ++at)
      values[(slot * Value::size + at) * num_warps + threadIdx.x / 32] = value.part[at];
    bulk_arrive(all_put + slot);
  }
  // Waits for the total.
  __device__ __forceinline__ Value total(unsigned turn) const {
    const int slot = turn % grid_slots;
    bulk_wait(published + slot, turn / grid_slots);
    Value value;
#pragma unroll
    for (int at = 0; at < Value::size; ++at) value.part[at] = totals[slot * Value::size + at];
    return value;
  }
  // The work of a warp that exchanges: every num_exchangers-th turn.
  __device__ __forceinline__ void exchange(long long num_turns) const {
    for (long long turn = threadIdx.x / 32 - num_warps; turn < num_turns;
         turn += Shape::num_exchangers) {
      const int slot = turn % grid_slots;
      bulk_wait(all_put + slot, turn / grid_slots);
      const Value total = words.total(turn, of_block(slot));
      if (threadIdx.x % 32 != 0) continue;
#pragma unroll
      for (int at = 0; at < Value::size; ++at) totals[slot * Value::size + at] = total.part[at];
      bulk_arrive(published + slot);
      if (turn + 1 == num_turns) words.leave(num_turns);
    }
  }

 private:
  __device__ __forceinline__ Value of_block(int slot) const {
    const int lane = threadIdx.x % 32;
    Value parts[1]{};
    if (lane < num_warps) {
#pragma unroll
      for (int at = 0; at < Value::size; ++at)
        parts[0].part[at] = values[(slot * Value::size + at) * num_warps + lane];
    }
    return total_of<power_of_two_from(num_warps)>(parts);
  }
};
