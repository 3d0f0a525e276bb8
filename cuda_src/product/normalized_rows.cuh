// normalized_rows.cuh -- norm_linear_few.cu: the rows, normalised in the block's shared memory
#pragma once
#include "memory.cuh"
#include "parameter.cuh"
#include "reduce.cuh"
#include "statistics.cuh"
#include "sum_load.cuh"

// A warp multiplies one part of the columns, unit_packs packs of 8 in each lane, of which the
// lanes' neighbouring ones make lines of 512 bytes.
constexpr int num_warps = 16, unit_packs = 4, part_cols = unit_packs * 32 * 8;

// Moments of `count` values. deviations: the sums of (value - first)^2 and of value - first.
__device__ __forceinline__ Moments<float> corrected_moments(float count, float first,
                                                            const Sum<float, 2>& deviations) {
  const float rest = deviations.part[1] * (1.0f / count), excess = deviations.part[1] * rest;
  // Leaves out an excess that overflowed.
  const float squares = excess - excess == 0 ? deviations.part[0] - excess : deviations.part[0];
  return {{count, first + rest, squares < 0 ? 0 : squares}};
}

// Moments of a warp's values. They are summed as deviations from `first`, the mean of a sample: one
// pack of each lane that `samples`. Few digits cancel: if a share s of the values is sampled, the
// squares add up to at most 1 + 1 / s times those of the centred values. Equal values give exactly
// that value and zero, because the sample's mean is found from deviations from one value, the
// origin. for_each(f): f(values) for each pack of this thread.
template <int pack_size, class ForEach>
__device__ __forceinline__ Moments<float> warp_moments(const float (&sample)[pack_size],
                                                       bool samples, int num_cols,
                                                       ForEach for_each) {
  if (num_cols == 0) return {};
  const float origin = usable_origin(__shfl_sync(0xffffffffu, sample[0], 0));
  const float of_sample = warp_sum<32>(samples ? sum_of(sample, origin) : 0.0f);
  const float num_sampled = static_cast<float>(min(num_cols, 32 * pack_size));
  const float first = origin + divide(of_sample, num_sampled, 1.0f / num_sampled);
  Sum<float, 2> deviations{};
  for_each([&](const auto& values) {
    float centered_values[pack_size];
#pragma unroll
    for (int at = 0; at < pack_size; ++at) centered_values[at] = values[at] - first;
    deviations.part[0] += squares_of(centered_values);
    deviations.part[1] += sum_of(centered_values);
  });
  return corrected_moments(static_cast<float>(num_cols), first, warp_reduce<32>(deviations));
}

// The total of the moments that the lanes of a warp have, to all of them. They are not merged in
// pairs, which would take a division for each pair. An empty part has a count of 0.
__device__ __forceinline__ Moments<float> total_of(const Moments<float>& of_lane) {
  const float count = of_lane.part[0];
  const auto sums = warp_reduce<32>(Sum<float, 2>{{count, count * of_lane.part[1]}});
  const float first = divide(sums.part[1], sums.part[0], 1.0f / sums.part[0]);
  const float distance = of_lane.part[1] - first, weighed = count * distance;
  const Sum<float, 2> deviations{{of_lane.part[2] + weighed * distance, weighed}};
  return corrected_moments(sums.part[0], first, warp_reduce<32>(deviations));
}

// x and, if there is one, a residual, on their way to shared memory.
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

// Of a row, from the moments of its parts, one in each lane: mean and rstd.
template <bool centered>
__device__ __forceinline__ float2 mean_rstd_of(const Moments<float>& of_lane, int num_cols,
                                               double eps) {
  Moments<float> total{};
  if constexpr (centered) {
    total = total_of(of_lane);
  } else {
    total.part[2] = warp_sum<32>(of_lane.part[2]);
  }
  return make_float2(total.part[1], uncentered(total.part[2], 1.0f / num_cols, eps).rstd);
}

// col: in the row. call: has norm_weight and norm_bias.
template <bool centered, class T, class Call>
__device__ __forceinline__ void normalize_pack(T* pack, int col, const float2& mean_rstd,
                                               const Call& call) {
  float values[8], scales[8], biases[8];
  call.norm_weight.template load<8>(col, scales);
  call.norm_bias.template load<8>(col, biases);
  unpack(load_pack<8>(pack), values);
#pragma unroll
  for (int at = 0; at < 8; ++at) {
    const float value = centered ? values[at] - mean_rstd.x : values[at];
    values[at] = fma(value * mean_rstd.y, scales[at], biases[at]);
  }
  store_pack<8>(pack, repack<T>(values));
}

// A thread has every num_threads-th pack of each row, from load to normalize.
template <class T, bool centered, int num_rows>
struct NormalizedRows {
  static constexpr int num_threads = num_warps * 32;
  Moments<float>* moments;  // [num_rows][num_warps]
  T* rows;                  // [num_rows][padded_cols], 0 beyond num_cols
  const int num_cols, padded_cols;

  __device__ __forceinline__ NormalizedRows(unsigned char* smem, int num_cols, int num_parts)
      : moments(reinterpret_cast<Moments<float>*>(smem)),
        rows(reinterpret_cast<T*>(moments + num_rows * num_warps)),
        num_cols(num_cols),
        padded_cols(num_parts * part_cols) {}
  __device__ __forceinline__ T* at(int row, int col) const {
    return rows + row * padded_cols + col;
  }
  __device__ __forceinline__ float* end() const {
    return reinterpret_cast<float*>(at(num_rows, 0));
  }

  // f(pack, col) for the thread's packs of a row, where they are in shared memory.
  template <class F>
  __device__ __forceinline__ void for_each_own(int row, F f) const {
#pragma unroll 1
    for (int col = threadIdx.x * 8; col < num_cols; col += num_threads * 8) f(at(row, col), col);
  }
  __device__ __forceinline__ void load(const AddedRows<T>& added) const {
#pragma unroll
    for (int row = 0; row < num_rows; ++row) {
      if (added.residual == nullptr) {
        for_each_own(row, [&](T* pack, int col) {
          async_copy<8>(pack, added.x + static_cast<long long>(row) * num_cols + col);
        });
      }
      for (int col = num_cols + threadIdx.x * 8; col < padded_cols; col += num_threads * 8)
        store_pack<8>(at(row, col), Pack<T, 8>{});
    }
    if (added.residual != nullptr) {
      const int packs_of_row = (num_cols + num_threads * 8 - 1) / (num_threads * 8);
      added.template add_all<2>(num_rows * packs_of_row, blockIdx.x == 0, [&](int pack, auto f) {
        const int row = pack / packs_of_row;
        const int col = (pack % packs_of_row * num_threads + static_cast<int>(threadIdx.x)) * 8;
        if (row < num_rows && col < num_cols)
          f(at(row, col), static_cast<long long>(row) * num_cols + col);
      });
    }
    async_commit();
  }

  // Of the warp's packs of a row. RMSNorm: the sum of squares alone.
  __device__ __forceinline__ Moments<float> moments_of(int row) const {
    const int num_packs = num_cols / 8, rest = num_packs % num_threads;
    const int first = threadIdx.x / 32 * 32, of_rest = max(0, min(rest - first, 32));
    const int count = (num_packs / num_threads * 32 + of_rest) * 8;
    const int col = static_cast<int>(threadIdx.x) * 8;
    float sample[8] = {};
    if (col < num_cols) unpack(load_pack<8>(at(row, col)), sample);
    const auto for_each = [&](auto f) {
      for_each_own(row, [&](const T* pack, int) {
        float values[8];
        unpack(load_pack<8>(pack), values);
        f(values);
      });
    };
    if constexpr (centered) return warp_moments(sample, col < num_cols, count, for_each);
    float squares = 0;
    for_each([&](const auto& values) { squares += squares_of(values); });
    return {{0.0f, 0.0f, warp_sum<32>(squares)}};
  }

  template <class Call>
  __device__ __forceinline__ void normalize(const Call& call) const {
    const int lane = threadIdx.x % 32;
    async_wait<0>();
#pragma unroll
    for (int row = 0; row < num_rows; ++row) {
      const Moments<float> found = moments_of(row);
      if (lane == 0) moments[row * num_warps + threadIdx.x / 32] = found;
    }
    __syncthreads();
#pragma unroll
    for (int row = 0; row < num_rows; ++row) {
      const Moments<float> of_warp =
          lane < num_warps ? moments[row * num_warps + lane] : Moments<float>{};
      const float2 found = mean_rstd_of<centered>(of_warp, num_cols, call.eps);
      if (blockIdx.x == 0 && threadIdx.x == 0) {
        if (call.mean != nullptr) call.mean[row] = found.x;
        if (call.rstd != nullptr) call.rstd[row] = found.y;
      }
      for_each_own(row,
                   [&](T* pack, int col) { normalize_pack<centered>(pack, col, found, call); });
    }
    __syncthreads();
  }
};
