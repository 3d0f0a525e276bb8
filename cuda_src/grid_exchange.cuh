// grid_exchange.cuh -- sums over all blocks of a grid that is resident at once
//
// In each turn every worker warp of a block puts a value. One more warp sends their sum to all
// blocks through global memory, and one more receives the sums of all blocks. Each word that is
// sent carries the number of its turn, so no fence is needed. Numbers continue from launch to
// launch.
//
// No two grids of one kernel run together: two of their blocks do not fit a multiprocessor, and
// there are more blocks than half of the multiprocessors (plan/paths.py).
#pragma once
#include "warp_moments.cuh"

// A block that sends turn t has received turn t - lag, which all others sent after they received
// turn t - 2 * lag: 2 * lag buffers suffice.
constexpr int grid_buffers = 8, most_grid_parts = 3, most_grid_blocks = 256;
__device__ unsigned long long grid_words[grid_buffers * most_grid_parts * most_grid_blocks];
__device__ unsigned grid_turns;  // of earlier launches

template <class Value, Tile tile>
struct GridExchange {
  static constexpr int num_blocks = tile.cluster_size;
  static constexpr int num_warps = tile.threads_per_row / 32 - 2;  // workers
  static constexpr int smem_bytes =
      (2 * Value::size * (num_warps + 1) * static_cast<int>(sizeof(float)) + 15) / 16 * 16;
  static constexpr int blocks_per_lane = (num_blocks + 31) / 32;
  static_assert(num_warps <= 32 && Value::size <= most_grid_parts &&
                num_blocks <= most_grid_blocks && 2 * tile.lag() <= grid_buffers);

  float* values;  // [2][Value::size][num_warps]
  float* totals;  // [2][Value::size]
  unsigned first_turn;

  __device__ __forceinline__ explicit GridExchange(unsigned char* smem)
      : values(reinterpret_cast<float*>(smem)),
        totals(values + 2 * Value::size * num_warps),
        first_turn(*const_cast<const volatile unsigned*>(&grid_turns) + 1) {}

  __device__ __forceinline__ static bool works() { return threadIdx.x / 32 < num_warps; }
  __device__ __forceinline__ static bool sends() { return threadIdx.x / 32 == num_warps; }

  // By all lanes of a worker warp, which have the same value. Then the block synchronises.
  __device__ __forceinline__ void put(unsigned turn, const Value& value) const {
    if (threadIdx.x % 32 != 0) return;
#pragma unroll
    for (int at = 0; at < Value::size; ++at)
      values[(turn % 2 * Value::size + at) * num_warps + threadIdx.x / 32] = value.part[at];
  }
  // By the warp that sends.
  __device__ __forceinline__ void send(unsigned turn) const {
    const int lane = threadIdx.x % 32;
    Value parts[1]{};
    if (lane < num_warps) {
#pragma unroll
      for (int at = 0; at < Value::size; ++at)
        parts[0].part[at] = values[(turn % 2 * Value::size + at) * num_warps + lane];
    }
    const Value value = total_of(parts);
    if (lane != 0) return;
#pragma unroll
    for (int at = 0; at < Value::size; ++at)
      *word(turn, at, blockIdx.x) = static_cast<unsigned long long>(first_turn + turn) << 32 |
                                    __float_as_uint(value.part[at]);
  }
  // By the warp that receives. Then the block synchronises. Blocks are added in a fixed order.
  __device__ __forceinline__ void receive(unsigned turn) const {
    const int lane = threadIdx.x % 32;
    Value received[blocks_per_lane];
    bool complete = false;
    while (!__all_sync(0xffffffffu, complete)) {
      complete = true;
#pragma unroll
      for (int index = 0; index < blocks_per_lane; ++index) {
#pragma unroll
        for (int at = 0; at < Value::size; ++at) {
          const int block = index * 32 + lane;
          received[index].part[at] = 0;
          if (num_blocks % 32 == 0 || block < num_blocks) {
            const unsigned long long sent = *word(turn, at, block);
            complete = complete && static_cast<unsigned>(sent >> 32) == first_turn + turn;
            received[index].part[at] = __uint_as_float(static_cast<unsigned>(sent));
          }
        }
      }
    }
    const Value total = total_of(received);
    if (lane != 0) return;
#pragma unroll
    for (int at = 0; at < Value::size; ++at) totals[turn % 2 * Value::size + at] = total.part[at];
  }
  __device__ __forceinline__ Value total(unsigned turn) const {
    Value value;
#pragma unroll
    for (int at = 0; at < Value::size; ++at) value.part[at] = totals[turn % 2 * Value::size + at];
    return value;
  }
  // By the warp that has received the last turn. By then all blocks have read grid_turns.
  __device__ __forceinline__ void leave(unsigned num_turns) const {
    if (blockIdx.x == 0) grid_turns = first_turn - 1 + num_turns;
  }

 private:
  __device__ __forceinline__ static volatile unsigned long long* word(unsigned turn, int at,
                                                                      int block) {
    return grid_words + ((turn % grid_buffers) * most_grid_parts + at) * most_grid_blocks + block;
  }
};
