// norm_linear_few -- y = norm(x + residual) weight^T + bias of 1 or 2 rows, a block owns outputs
// owns:  a block normalises all rows. Then a warp has one part of the columns, in registers, and
//        one output after the other; sums of parts meet in shared memory
// moves: the weight once; x, the residual and the norm's parameters once a block, from the L2
//        cache; y and the sum out
// takes: bfloat16 and float16, 1 to num_warps parts of columns; more rows: norm_linear.cu
// needs: sm_80; in_features a multiple of 8, addresses aligned to 16 bytes
#include "bulk.cuh"
#include "normalized_rows.cuh"

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

template <class T, class NormWeight, class NormBias, bool zero_centered>
struct NormLinearFew {
  AddedRows<T> rows;  // [num_rows, in_features]
  const T* bias;      // null: absent
  LoadParameter<NormWeight, zero_centered> norm_weight;
  LoadParameter<NormBias, false, 0> norm_bias;
  T* y;         // [num_rows, out_features], contiguous
  float* mean;  // null: not wanted; so too rstd
  float* rstd;
  long long num_rows;
  long long in_features;
  long long out_features;
  double eps;
  const T* weight;  // [out_features, in_features], contiguous
  long long outputs_of_block;
};

template <class T, class NormWeight, class NormBias, bool zero_centered, bool centered,
          int num_rows>
__global__ void __launch_bounds__(num_warps * 32, 1)
    norm_linear_few(const NormLinearFew<T, NormWeight, NormBias, zero_centered> call) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_cols = call.in_features;
  const int num_parts = (num_cols + part_cols - 1) / part_cols, num_turns = num_warps / num_parts;
  const int part = warp % num_parts, turn = warp / num_parts;
  const long long first_output = blockIdx.x * call.outputs_of_block;
  const int outputs = min(call.outputs_of_block, call.out_features - first_output);

  NormalizedRows<T, centered, num_rows> rows(dynamic_smem(), num_cols, num_parts);
  rows.load(call.rows);
  if (blockIdx.x == 0) {
    prefetch(call.norm_weight.weight, num_cols);
    prefetch(call.norm_bias.weight, num_cols);
  }
  // A warp beyond the turns has no outputs, but takes part in the rest.
  WeightUnits<T, units_ahead<num_rows>> units(call.weight + first_output * num_cols, num_cols, part,
                                              turn < num_turns ? turn : outputs, num_turns,
                                              outputs);
  units.begin();
  rows.normalize(call);
  float* sums = rows.end();  // [outputs][num_rows][num_parts]

  while (units.output < outputs) {
#pragma unroll
    for (int at = 0; at < units_ahead<num_rows>; ++at) {
      float products[num_rows];
#pragma unroll
      for (int row = 0; row < num_rows; ++row)
        products[row] = units.multiply(at, rows.at(row, first_col_of(part)));
      const int output = units.output;
      units.replace(at);
#pragma unroll
      for (int row = 0; row < num_rows; ++row) {
        const float sum = warp_reduce<32>(Sum<float, 1>{{products[row]}}).part[0];
        if (lane == 0 && output < outputs) sums[(output * num_rows + row) * num_parts + part] = sum;
      }
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int at = threadIdx.x; at < outputs * num_rows; at += num_warps * 32) {
    const long long output = first_output + at / num_rows;
    float value[1] = {0.0f};
    if (call.bias != nullptr) unpack(load_pack<1>(call.bias + output), value);
    float sum = sums[at * num_parts];
    for (int other = 1; other < num_parts; ++other) sum += sums[at * num_parts + other];
    value[0] += sum;
    store_pack<1>(call.y + at % num_rows * call.out_features + output, repack<T>(value));
  }
}
