// warp_moments.cuh -- count, mean and squares of values that the lanes of a warp have
#pragma once
#include "mean_rstd.cuh"
#include "sums.cuh"

// Moments of `count` values. deviations: the sums of (value - first)^2 and of value - first.
__device__ __forceinline__ Moments<float> corrected_moments(float count, float first,
                                                            const Sum<float, 2>& deviations) {
  const float rest = deviations.part[1] * (1.0f / count), excess = deviations.part[1] * rest;
  // Leaves out an excess that overflowed.
  const float squares = excess - excess == 0 ? deviations.part[0] - excess : deviations.part[0];
  return {{count, first + rest, squares < 0 ? 0 : squares}};
}

struct Deviations {
  float first;
  Sum<float, 2> sums;  // of (value - first)^2 and of value - first
};

// The deviations of a warp's values, of which there is one or more. first: the mean of a sample,
// one pack of each lane that `samples`. Few digits cancel: if a share s of the values is sampled,
// the squares add up to at most 1 + 1 / s times those of the centred values. Equal values give
// exactly that value and zero, because the sample's mean is found from deviations from one value,
// the origin. for_each(f): f(values) for each pack of this thread.
template <int pack_size, class ForEach>
__device__ __forceinline__ Deviations warp_deviations(const float (&sample)[pack_size],
                                                      bool samples, int num_cols,
                                                      ForEach for_each) {
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
  return {first, warp_reduce<32>(deviations)};
}
template <int pack_size, class ForEach>
__device__ __forceinline__ Moments<float> warp_moments(const float (&sample)[pack_size],
                                                       bool samples, int num_cols,
                                                       ForEach for_each) {
  if (num_cols == 0) return {};
  const Deviations found = warp_deviations(sample, samples, num_cols, for_each);
  return corrected_moments(static_cast<float>(num_cols), found.first, found.sums);
}

// The total of `count` parts in each of `lanes` lanes, to all of them. Moments are not merged in
// pairs, which would take a division for each pair. An empty part has a count of 0.
template <int lanes = 32, int count>
__device__ __forceinline__ Moments<float> total_of(const Moments<float> (&parts)[count]) {
  Sum<float, 2> sums{};
#pragma unroll
  for (int at = 0; at < count; ++at) {
    sums.part[0] += parts[at].part[0];
    sums.part[1] += parts[at].part[0] * parts[at].part[1];
  }
  sums = warp_reduce<lanes>(sums);
  const float first = divide(sums.part[1], sums.part[0], 1.0f / sums.part[0]);
  Sum<float, 2> deviations{};
#pragma unroll
  for (int at = 0; at < count; ++at) {
    const float distance = parts[at].part[1] - first;
    const float weighed = parts[at].part[0] * distance;
    deviations.part[0] += parts[at].part[2] + weighed * distance;
    deviations.part[1] += weighed;
  }
  return corrected_moments(sums.part[0], first, warp_reduce<lanes>(deviations));
}
template <int lanes = 32, int num_parts, int count>
__device__ __forceinline__ Sum<float, num_parts> total_of(
    const Sum<float, num_parts> (&parts)[count]) {
  Sum<float, num_parts> total = parts[0];
#pragma unroll
  for (int at = 1; at < count; ++at) total.merge(parts[at]);
  return warp_reduce<lanes>(total);
}
