// several_rows.cuh -- norm_linear_several.cu: rows that the blocks of a cluster normalise together
//
// Each block has some columns of all rows, in shared memory, as tiles for tensor cores. All
// functions are for the warps that normalise.
#pragma once
#include "normalized_packs.cuh"
#include "several_memory.cuh"

constexpr int warp_cols = 32 * 8;  // of one pack in each lane

// Call: the argument of the kernel.
template <class T, class Call>
struct SeveralRows {
  using Weight = decltype(Call::norm_weight);
  using Bias = decltype(Call::norm_bias);

  const Call& call;
  const SeveralMemory& memory;
  const SeveralPart& part;
  const int warp, lane;
  // A warp normalises warp_cols columns of every num_turns-th row, so that a lane needs 8 of the
  // norm's weights and biases. These are on their way while the rows are.
  const int num_parts, num_turns, own_col;
  typename Weight::template Kept<8> weight;
  typename Bias::template Kept<8> bias;

  __device__ __forceinline__ SeveralRows(const Call& call, const SeveralMemory& memory,
                                         const SeveralPart& part)
      : call(call),
        memory(memory),
        part(part),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        num_parts(max(1, (part.num_cols + warp_cols - 1) / warp_cols)),
        num_turns(num_normalizing_warps / num_parts),
        own_col(warp % num_parts * warp_cols + lane * 8) {}

  // col: of the block's columns.
  __device__ __forceinline__ T* pack(int row, int col) const {
    const int unit = (col / 8 ^ row) & 7;
    return reinterpret_cast<T*>(memory.steps + col / step_cols * memory.step_bytes +
                                row * line_bytes + unit * 16);
  }
  // f(pack, col) for the lane's packs of a row.
  template <class F>
  __device__ __forceinline__ void for_each_own(int row, F f) const {
#pragma unroll 1
    for (int col = lane * 8; col < part.num_cols; col += warp_cols) f(pack(row, col), col);
  }
  __device__ __forceinline__ void load() {
    const AddedRows<T>& added = call.rows;
    for (int row = warp; row < memory.num_rows; row += num_normalizing_warps) {
      const long long first = row * call.in_features + part.first_col;
      if (added.residual == nullptr) {
        for_each_own(row, [&](T* pack, int col) { async_copy<8>(pack, added.x + first + col); });
      } else {
        added.template add_all<4>(num_parts, part.cluster == 0, [&](int index, auto f) {
          const int col = index * warp_cols + lane * 8;
          if (col < part.num_cols) f(pack(row, col), first + col);
        });
      }
      const int col = part.num_cols + lane * 8;
      if (col < part.num_steps * step_cols) store_pack<8>(pack(row, col), Pack<T, 8>{});
    }
    async_commit();
    if (own_col >= part.num_cols) return;
    weight = call.norm_weight.template keep<8>(part.first_col + own_col);
    bias = call.norm_bias.template keep<8>(part.first_col + own_col);
  }

  template <bool centered>
  __device__ __forceinline__ void normalize() const {
    constexpr int batch = 4;
    const int turn = warp / num_parts;
    if (turn >= num_turns || own_col >= part.num_cols) return;
    float scales[8], biases[8];
    Weight::unpack(weight, scales);
    Bias::unpack(bias, biases);
    for (int first = turn; first < memory.num_rows; first += batch * num_turns) {
      Pack<T, 8> packs[batch] = {};
      const auto for_each = [&](auto f) {
#pragma unroll
        for (int at = 0; at < batch; ++at) {
          const int row = first + at * num_turns;
          if (row < memory.num_rows) f(packs[at], row);
        }
      };
      for_each([&](auto& held, int row) { held = load_pack<8>(pack(row, own_col)); });
      for_each([&](auto& held, int row) {
        held = normalized<centered>(held, memory.head.mean_rstd[row], scales, biases);
      });
      for_each([&](auto& held, int row) { store_pack<8>(pack(row, own_col), held); });
    }
  }
};
