// grid_exchange.cuh -- sums over all warps of all blocks of a group, some turns later
//
// In each turn every worker warp of a block puts a value. One of num_exchangers other warps adds
// them, exchanges the sum with other blocks (grid_words.cuh), and hands the total to the workers.
// No barrier of the whole block is needed: the workers may be a few turns ahead.
#pragma once
#include "bulk.cuh"
#include "grid_words.cuh"

template <class Value, Tile tile>
struct GridExchange {
  using Shape = GridShape<tile>;
  static constexpr int num_warps = Shape::num_warps;
  // A warp reuses a slot after grid_slots turns: see grid_words.cuh.
  static constexpr int smem_bytes =
      (grid_slots * (16 + Value::size * (num_warps + 1) * 4) + 15) / 16 * 16;
  static_assert(num_warps <= 32);

  unsigned long long* were_put;  // [grid_slots] barriers
  unsigned long long* arrived;   // [grid_slots] barriers
  float* values;                 // [grid_slots][Value::size][num_warps]
  float* totals;                 // [grid_slots][Value::size]
  GridWords<Value, tile> words;

  __device__ __forceinline__ explicit GridExchange(unsigned char* smem)
      : were_put(reinterpret_cast<unsigned long long*>(smem)),
        arrived(were_put + grid_slots),
        values(reinterpret_cast<float*>(arrived + grid_slots)),
        totals(values + grid_slots * Value::size * num_warps) {
    if (threadIdx.x == 0) {
      for (int slot = 0; slot < grid_slots; ++slot) {
        bulk_barrier_init(were_put + slot, num_warps);
        bulk_barrier_init(arrived + slot, 1);
      }
    }
    __syncthreads();
  }

  // By all lanes of a worker warp, which have the same value.
  __device__ __forceinline__ void put(unsigned turn, const Value& value) const {
    if (threadIdx.x % 32 != 0) return;
    const int slot = turn % grid_slots;
#pragma unroll
    for (int at = 0; at < Value::size; ++at)
      values[(slot * Value::size + at) * num_warps + threadIdx.x / 32] = value.part[at];
    bulk_arrive(were_put + slot);
  }
  __device__ __forceinline__ Value total(unsigned turn) const {
    const int slot = turn % grid_slots;
    bulk_wait(arrived + slot, turn / grid_slots);
    Value value;
#pragma unroll
    for (int at = 0; at < Value::size; ++at) value.part[at] = totals[slot * Value::size + at];
    return value;
  }
  // By a warp that exchanges: the turns that are its own.
  __device__ __forceinline__ void exchange(long long num_turns) const {
    for (long long turn = threadIdx.x / 32 - num_warps; turn < num_turns;
         turn += Shape::num_exchangers) {
      const int slot = turn % grid_slots;
      bulk_wait(were_put + slot, turn / grid_slots);
      const Value total = words.total(turn, of_block(slot));
      if (threadIdx.x % 32 != 0) continue;
#pragma unroll
      for (int at = 0; at < Value::size; ++at) totals[slot * Value::size + at] = total.part[at];
      bulk_arrive(arrived + slot);
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
