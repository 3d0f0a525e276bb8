// backward_ring_row.cuh -- the sums of a pack of a row, of path `ring`
#pragma once
#include "backward.cuh"

// Adds a pack to its columns' sums of dweight and dbias. Returns its sums of wdy * x_hat and of
// wdy. A pack that is not present adds zeros.
template <Gradients gradients, bool centered, int pack_size, class Compute>
__device__ __forceinline__ Sum<Compute, 2> sum_pack(
    Compute (&dweight)[pack_size], Compute (&dbias)[pack_size], const Compute (&xs)[pack_size],
    const Compute (&dys)[pack_size], const Compute (&weights)[pack_size],
    const RowGradient<Compute>& gradient, bool present) {
  Sum<Compute, 2> sums{};
#pragma unroll
  for (int at = 0; at < pack_size; ++at) {
    const Compute dy = present ? dys[at] : Compute(0);
    const Compute x_hat = present ? gradient.template x_hat<centered>(xs[at]) : Compute(0);
    if constexpr (gradients.dweight) dweight[at] += dy * x_hat;
    if constexpr (gradients.dbias) dbias[at] += dy;
    if constexpr (gradients.dx) {
      const Compute wdy = rounded_product(dy, weights[at]);
      sums.part[0] += wdy * x_hat;
      if constexpr (centered) sums.part[1] += wdy;
    }
  }
  return sums;
}
