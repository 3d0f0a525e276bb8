// fold_weight -- folded = weight norm_weight, rows centered for LayerNorm; a block owns a row
// owns:  each thread every block_size-th pack, of which it keeps packs_per_thread in registers and
//        reads others twice; sums are made twice: before and after rounding
// moves: weight in, folded out, 2 bytes an element each; norm_weight and norm_bias, from the caches
// takes: weights of bfloat16 and float16, norm parameters of any type, any number of rows
// needs: in_features a multiple of 8, addresses aligned to 16 bytes
#include "column_terms.cuh"
#include "parameter.cuh"
#include "reduce.cuh"

template <class T, class NormWeight, class NormBias, bool zero_centered>
struct FoldWeight {
  const T* weight;  // [out_features, in_features], contiguous
  const T* bias;    // null: absent
  LoadParameter<NormWeight, zero_centered> norm_weight;
  LoadParameter<NormBias, false, 0> norm_bias;
  T* folded;  // as weight, but for the order of rows, of which there are a multiple of 32
  // As many rows, [.., num_term_cols] (column_terms.cuh), contiguous. sum: of the rounded row, or 0
  // for RMSNorm. bias: bias + weight norm_bias
  unsigned* terms;
  long long in_features;
};

// Where a row lies in the result. Rows become columns of norm_linear.cu's y, of which a lane of a
// warp then has 8 adjacent ones: columns 2 (l % 4) and the next of each 8 (warpgroup.cuh).
__device__ __forceinline__ long long folded_row(long long row) {
  return row / 32 * 32 + row / 2 % 4 * 8 + row / 8 % 4 * 2 + row % 2;
}

template <class T, class NormWeight, class NormBias, bool zero_centered, bool centered, Tile tile>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm)
    fold_weight(const FoldWeight<T, NormWeight, NormBias, zero_centered> call) {
  constexpr int pack_size = tile.pack_size, step = tile.block_size() * pack_size;
  const long long row = blockIdx.x, to = folded_row(row), num_cols = call.in_features;
  const T* weight = call.weight + row * num_cols;
  const long long first = threadIdx.x * pack_size;
  BlockReduce<tile.block_size(), float> block(dynamic_smem());

  Pack<T, pack_size> kept[tile.packs_per_thread];
#pragma unroll
  for (int at = 0; at < tile.packs_per_thread; ++at)
    if (first + at * step < num_cols) kept[at] = load_pack<pack_size>(weight + first + at * step);
  // use(col, values, scales): for each pack of this thread, and of the norm's weight.
  const auto for_each = [&](auto use) {
    const auto scaled = [&](long long col, const Pack<T, pack_size>& pack) {
      float values[pack_size], scales[pack_size];
      unpack(pack, values);
      call.norm_weight.template load<pack_size>(col, scales);
      use(col, values, scales);
    };
#pragma unroll
    for (int at = 0; at < tile.packs_per_thread; ++at)
      if (first + at * step < num_cols) scaled(first + at * step, kept[at]);
    for (long long col = first + tile.packs_per_thread * step; col < num_cols; col += step)
      scaled(col, load_pack<pack_size>(weight + col));
  };

  Sum<float, 2> sums{};  // of weight norm_weight, and of weight norm_bias
  for_each([&](long long col, const auto& values, const auto& scales) {
    float biases[pack_size];
    call.norm_bias.template load<pack_size>(col, biases);
#pragma unroll
    for (int at = 0; at < pack_size; ++at) {
      sums.part[0] += values[at] * scales[at];
      sums.part[1] = fma(values[at], biases[at], sums.part[1]);
    }
  });
  sums = block.all(sums);
  const float mean = centered ? sums.part[0] / num_cols : 0.0f;

  Sum<float, 1> rounded{};
  for_each([&](long long col, auto& values, const auto& scales) {
#pragma unroll
    for (int at = 0; at < pack_size; ++at) values[at] = fma(values[at], scales[at], -mean);
    const Pack<T, pack_size> pack = repack<T>(values);
    store_pack<pack_size>(call.folded + to * num_cols + col, pack);
    unpack(pack, values);
#pragma unroll
    for (int at = 0; at < pack_size; ++at) rounded.part[0] += values[at];
  });
  rounded = block.all(rounded);
  if (threadIdx.x != 0) return;
  float bias[1] = {0.0f};
  if (call.bias != nullptr) unpack(load_pack<1>(call.bias + row), bias);
  unsigned words[2][4];
  column_words(centered ? rounded.part[0] : 0.0f, words[0]);
  column_words(bias[0] + sums.part[1], words[1]);
#pragma unroll
  for (int at = 0; at < num_term_cols / 2; ++at)
    call.terms[to * (num_term_cols / 2) + at] = words[at / 4][at % 4];
}
