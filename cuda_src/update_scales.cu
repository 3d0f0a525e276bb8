// update_scales -- scales from a history of amaxes, which shifts by one step; a block owns a tensor
// owns:  nothing: the history is shifted in place, as many steps at a time as there are threads
// moves: the history twice in, once out: 12 bytes a step
// takes: any number of steps and of tensors, by the formulas of TransformerEngine's DelayedScaling
// needs: nothing else. It works on bits, or in double, because the compiler flushes floats below
//        2^-126
#include "scales.cuh"

struct UpdateScales {
  unsigned* scale;       // [num_tensors] bits of floats
  unsigned* history;     // [num_steps, num_tensors] bits of floats: this step's, then the oldest to
                         // the latest
  const float* largest;  // [num_tensors] of each format
  double factor;         // 2^-margin
  long long most_recent;  // 1: use this step's amax; 0: the largest of all
  long long num_steps;
  long long num_tensors;
};

__device__ __forceinline__ double double_of(unsigned bits) {
  return bits < 1u << 23 ? bits * 0x1p-149 : static_cast<double>(__uint_as_float(bits));
}

template <Tile tile>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm)
    update_scales(const UpdateScales call) {
  const long long num_steps = call.num_steps, step = call.num_tensors;
  unsigned* const history = call.history + blockIdx.x;
  const unsigned latest = history[0];
  if ((latest & 0x7fffffffu) == 0) return;  // the tensor was not used
  Largest amax{};
  for (long long at = threadIdx.x; at < num_steps; at += tile.block_size()) {
    const unsigned bits = history[at * step];
    if (bits <= infinity_bits) amax.add(bits);  // a NaN is no maximum
  }
  BlockReduce<tile.threads_per_row, float> reduce(dynamic_smem());
  const unsigned recent = call.most_recent ? latest : reduce.all(amax).bits();
  if (threadIdx.x == 0 && recent > 0 && recent < infinity_bits) {
    const double numerator =
        double_of(float_bits(static_cast<double>(call.largest[blockIdx.x]) * call.factor));
    call.scale[blockIdx.x] =
        min(float_bits(fmin(numerator / double_of(recent), 0x1.fffffep127)), infinity_bits - 1);
  }
  // Step `at` gets the amax of the step after it, the last one that of this step.
  for (long long first = 0; first < num_steps; first += tile.block_size()) {
    const long long at = first + threadIdx.x;
    const bool moves = at > 0 && at + 1 < num_steps;
    const unsigned next = moves ? history[(at + 1) * step] : latest;
    __syncthreads();
    if (at < num_steps) history[at * step] = at == 0 ? 0 : next;
    __syncthreads();
  }
}
