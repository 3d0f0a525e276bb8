// weight_units.cuh -- norm_linear_few.cu: the weights of a warp, on their way to its registers
#pragma once
#include "bulk.cuh"
#include "convert.cuh"

// A warp multiplies one part of the columns, unit_packs packs of 8 in each lane, of which the
// lanes' neighbouring ones make lines of 512 bytes.
constexpr int num_warps = 16, unit_packs = 4, part_cols = unit_packs * 32 * 8;
// Outputs whose weights a warp has on their way.
template <int num_rows>
constexpr int units_ahead = num_rows == 1 ? 3 : 2;

// The lane's packs begin here, 256 columns apart.
__device__ __forceinline__ int first_col_of(int part) {
  return part * part_cols + static_cast<int>(threadIdx.x) % 32 * 8;
}

// The weights of a part, output after output: loaded `ahead` outputs before they are needed.
template <class T, int ahead>
struct WeightUnits {
  Pack<T, 8> packs[ahead][unit_packs] = {};  // stays 0 where the row has no columns
  const T* next;                             // the lane's first pack of what is loaded next
  const long long distance;
  const int num_packs, step, outputs;  // num_packs: of the lane
  int output;                          // that is multiplied

  // weight: the block's first row. first, step: the warp's first output, and from one to the next.
  __device__ __forceinline__ WeightUnits(const T* weight, int num_cols, int part, int first,
                                         int step, int outputs)
      : next(weight + first * static_cast<long long>(num_cols) + first_col_of(part)),
        distance(static_cast<long long>(step) * num_cols),
        num_packs((num_cols - first_col_of(part) + 255) / 256),
        step(step),
        outputs(outputs),
        output(first) {}

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int at = 0; at < ahead; ++at) load(at, output + at * step);
  }
  __device__ __forceinline__ void load(int at, int loaded) {
    const int there = loaded < outputs ? num_packs : 0;
#pragma unroll
    for (int pack = 0; pack < unit_packs; ++pack)
      load_once(packs[at][pack], next + pack * 256, pack < there);
    next += distance;
  }
  // After multiply(at): the lane's share of a product.
  __device__ __forceinline__ void replace(int at) {
    load(at, output + ahead * step);
    output += step;
  }
  // row: the lane's first pack, in shared memory; kept in registers it would be unpacked too early,
  // which takes too many of them.
  __device__ __forceinline__ float multiply(int at, const T* row) const {
    float sums[unit_packs];
#pragma unroll
    for (int pack = 0; pack < unit_packs; ++pack) {
      float values[8], factors[8];
      Pack<T, 8> of_row;
      smem_reload(row + pack * 256, of_row.word);
      unpack(of_row, values);
      unpack(packs[at][pack], factors);
      sums[pack] = values[0] * factors[0];
#pragma unroll
      for (int col = 1; col < 8; ++col) sums[pack] = fma(values[col], factors[col], sums[pack]);
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
};
