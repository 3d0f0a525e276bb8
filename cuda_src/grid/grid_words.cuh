// grid_words.cuh -- sums over the blocks of a group that is resident at once, by global memory
//
// Each block sends its sum to global memory. One block of the group, another one in each turn,
// polls these, adds them in a fixed order and publishes the total, which the others poll. If all
// blocks polled all sums, they would delay each other. A word has a part of a sum and the number of
// its turn, so no fence is needed. Numbers continue from launch to launch.
//
// Two launches of one kernel never run together: a multiprocessor holds one block, and a launch has
// more blocks than half of the multiprocessors (plan/grids.py).
#pragma once
#include "grid_shape.cuh"
#include "warp_moments.cuh"

// A warp puts its sum of turn t after it has received the total of turn t - turns_behind - 1. By
// then all warps of all blocks had put theirs of that turn, so none of them needs a word of an
// earlier one. More than turns_behind + 1 slots are enough.
constexpr int grid_slots = 8, most_grid_parts = 3, most_grid_blocks = 256, most_grid_groups = 16;
__device__ unsigned long long grid_words[grid_slots][most_grid_parts][most_grid_blocks];
__device__ __align__(32) unsigned long long grid_totals[most_grid_groups][grid_slots][4];
__device__ unsigned grid_turns[most_grid_groups];  // of earlier launches

template <class Value, Tile tile>
struct GridWords {
  using Shape = GridShape<tile>;
  static constexpr int num_blocks = Shape::num_blocks, blocks_per_lane = (num_blocks + 31) / 32;
  static_assert(Value::size <= most_grid_parts && num_blocks <= most_grid_blocks &&
                Shape::turns_behind + 1 < grid_slots);

  unsigned first_number;

  __device__ __forceinline__ GridWords()
      : first_number(*const_cast<const volatile unsigned*>(&grid_turns[Shape::group()]) + 1) {}

  // Called by one warp of each block. Returns the total of the blocks' sums to all lanes.
  __device__ __forceinline__ Value total(unsigned turn, const Value& own) const {
    const unsigned number = first_number + turn, slot = turn % grid_slots;
    send(&grid_words[slot][0][blockIdx.x], most_grid_blocks, number, own);
    unsigned long long* const published = grid_totals[Shape::group()][slot];
    if (Shape::rank() == turn % num_blocks) {
      const Value total = of_blocks(&grid_words[slot][0][Shape::group() * num_blocks], number);
      send(published, 1, number, total);
      return total;
    }
    Value total;
    bool complete = false;
    while (!__all_sync(0xffffffffu, complete)) complete = receive(published, 1, number, total);
    return total;
  }
  // Called by one thread of a block once it has the last total: all blocks of the group have read
  // grid_turns by then.
  __device__ __forceinline__ void leave(unsigned num_turns) const {
    if (Shape::rank() == 0) grid_turns[Shape::group()] = first_number - 1 + num_turns;
  }

 private:
  __device__ __forceinline__ static Value of_blocks(const unsigned long long* words,
                                                    unsigned number) {
    Value received[blocks_per_lane];
    bool complete = false;
    while (!__all_sync(0xffffffffu, complete)) {
      complete = true;
#pragma unroll
      for (int index = 0; index < blocks_per_lane; ++index) {
        const int block = index * 32 + static_cast<int>(threadIdx.x) % 32;
        received[index] = {};
        if (num_blocks % 32 == 0 || block < num_blocks)
          complete &= receive(words + block, most_grid_blocks, number, received[index]);
      }
    }
    return total_of(received);
  }
  // The parts of a value are `step` words apart.
  __device__ __forceinline__ static void send(volatile unsigned long long* words, int step,
                                              unsigned number, const Value& value) {
    if (threadIdx.x % 32 != 0) return;
#pragma unroll
    for (int at = 0; at < Value::size; ++at)
      words[at * step] =
          static_cast<unsigned long long>(number) << 32 | __float_as_uint(value.part[at]);
  }
  __device__ __forceinline__ static bool receive(const volatile unsigned long long* words, int step,
                                                 unsigned number, Value& value) {
    bool complete = true;
#pragma unroll
    for (int at = 0; at < Value::size; ++at) {
      const unsigned long long sent = words[at * step];
      complete = complete && static_cast<unsigned>(sent >> 32) == number;
      value.part[at] = __uint_as_float(static_cast<unsigned>(sent));
    }
    return complete;
  }
};
