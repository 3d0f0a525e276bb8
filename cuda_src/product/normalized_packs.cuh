// normalized_packs.cuh -- rows that are normalised in shared memory before they are multiplied
//
// NormLinearRows      what norm_linear_few.cu is given, but for the weight
// AddedRows           x and, if there is one, a residual, on their way to shared memory
// moments_of_packs    of a warp's packs of a row
// mean_rstd_of        of a row, from the moments of its parts, one in each lane
// normalized          a pack, with the norm's parameters in registers
// normalize_pack      in its place, with those in memory
#pragma once
#include "memory.cuh"
#include "parameter.cuh"
#include "residual_load.cuh"
#include "warp_moments.cuh"

template <class T>
struct AddedRows {
  const T* x;         // [num_rows, num_cols], contiguous; so too the others
  const T* residual;  // null: absent
  T* sum;             // x + residual, rounded. null: not wanted

  struct Begun {
    Pack<T, 8> packs[2];
  };
  __device__ __forceinline__ Begun begin(long long at) const {
    return {{load_pack<8>(x + at), load_pack<8>(residual + at)}};
  }
  // keeps_sum: whether this thread writes the sum.
  __device__ __forceinline__ void add(T* smem, long long at, const Begun& begun,
                                      bool keeps_sum) const {
    const Pack<T, 8> added = ResidualLoad<T>::combine(begun.packs);
    if (keeps_sum && sum != nullptr) store_pack<8>(sum + at, added);
    store_pack<8>(smem, added);
  }
  // find(pack, f): f(smem, at) if this thread has the pack. The loads of `batch` packs begin
  // before the first sum is written.
  template <int batch, class Find>
  __device__ __forceinline__ void add_all(int num_packs, bool keeps_sum, Find find) const {
    Begun begun[batch];
#pragma unroll 1
    for (int first = 0; first < num_packs; first += batch) {
#pragma unroll
      for (int each = 0; each < batch; ++each)
        find(first + each, [&](T*, long long at) { begun[each] = begin(at); });
#pragma unroll
      for (int each = 0; each < batch; ++each)
        find(first + each, [&](T* smem, long long at) { add(smem, at, begun[each], keeps_sum); });
    }
  }
};

template <class T, class NormWeight, class NormBias, bool zero_centered>
struct NormLinearRows {
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
};

// sample, samples, for_each: as of warp_moments. RMSNorm: the sum of squares alone.
template <bool centered, class ForEach>
__device__ __forceinline__ Moments<float> moments_of_packs(const float (&sample)[8], bool samples,
                                                           int num_cols, ForEach for_each) {
  if constexpr (centered) {
    return warp_moments(sample, samples, num_cols, for_each);
  } else {
    Sum<float, 1> squares{};
    for_each([&](const auto& values) { squares.part[0] += squares_of(values); });
    return {{0.0f, 0.0f, warp_reduce<32>(squares).part[0]}};
  }
}

template <bool centered, int lanes>
__device__ __forceinline__ float2 mean_rstd_of(const Moments<float>& of_lane, int num_cols,
                                               double eps) {
  const Moments<float> parts[1] = {of_lane};
  Moments<float> total{};
  if constexpr (centered)
    total = total_of<lanes>(parts);
  else
    total.part[2] = warp_reduce<lanes>(Sum<float, 1>{{of_lane.part[2]}}).part[0];
  return make_float2(total.part[1], uncentered(total.part[2], 1.0f / num_cols, eps).rstd);
}

template <bool centered, class T>
__device__ __forceinline__ Pack<T, 8> normalized(const Pack<T, 8>& pack, const float2& mean_rstd,
                                                 const float (&scales)[8],
                                                 const float (&biases)[8]) {
  float values[8];
  unpack(pack, values);
#pragma unroll
  for (int at = 0; at < 8; ++at) {
    const float value = centered ? values[at] - mean_rstd.x : values[at];
    values[at] = fma(value * mean_rstd.y, scales[at], biases[at]);
  }
  return repack<T>(values);
}
// col: in the row. call: has norm_weight and norm_bias.
template <bool centered, class T, class Call>
__device__ __forceinline__ void normalize_pack(T* pack, int col, const float2& mean_rstd,
                                               const Call& call) {
  float scales[8], biases[8];
  call.norm_weight.template load<8>(col, scales);
  call.norm_bias.template load<8>(col, biases);
  store_pack<8>(pack, normalized<centered>(load_pack<8>(pack), mean_rstd, scales, biases));
}

// By one thread, which has them; call: has mean and rstd, null: not wanted.
template <class Call>
__device__ __forceinline__ void save_mean_rstd(const Call& call, int row, const float2& mean_rstd) {
  if (call.mean != nullptr) call.mean[row] = mean_rstd.x;
  if (call.rstd != nullptr) call.rstd[row] = mean_rstd.y;
}
