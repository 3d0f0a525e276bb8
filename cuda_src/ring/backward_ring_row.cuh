// backward_ring_row.cuh -- what a backward ring computes of each row
#pragma once
#include "backward.cuh"
#include "turns.cuh"

// What backward needs of the row of a turn.
template <bool centered, class Call, Tile tile>
__device__ __forceinline__ auto gradient_of_turn(const Call& call, const Turns<tile>& turns,
                                                 unsigned turn) {
  return call.template gradient_of<centered>(
      min(turns.first_row + turn * turns.step, call.num_rows - 1));
}

// Adds a pack of a row to its columns' sums. Returns the pack's sums of wdy * x_hat and of wdy. A
// pack that is not present adds zeros.
template <Gradients gradients, bool centered, int pack_size, class Compute>
__device__ __forceinline__ Sum<Compute, 2> add_to_sums(
    Compute (&dweight)[pack_size], Compute (&dbias)[pack_size], const Compute (&xs)[pack_size],
    const Compute (&dys)[pack_size], const Compute (&weight_values)[pack_size],
    const RowGradient<Compute>& gradient, bool present) {
  Compute partial[2] = {};
#pragma unroll
  for (int index = 0; index < pack_size; ++index) {
    const Compute dy = present ? dys[index] : Compute(0);
    const Compute x_hat = present ? gradient.template x_hat<centered>(xs[index]) : Compute(0);
    if constexpr (gradients.dweight) dweight[index] += dy * x_hat;
    if constexpr (gradients.dbias) dbias[index] += dy;
    if constexpr (gradients.dx) {
      const Compute wdy = rounded_product(dy, weight_values[index]);
      partial[0] += wdy * x_hat;
      if constexpr (centered) partial[1] += wdy;
    }
  }
  return {{partial[0], partial[1]}};
}
