// kept_packs.cuh -- weights or biases of all packs of a thread, which it keeps for many rows
#pragma once
#include "parameter.cuh"

// joined: packs that are kept as one, 1 or 2. Single elements of 16 bits would take a register
// each.
template <class Parameter, bool zero_centered, int pack_size, int num_packs, int joined>
struct KeptPacks {
  KeptParameter<Parameter, zero_centered, joined * pack_size>
      kept[(num_packs + joined - 1) / joined];

  // col_of(pack): where a pack begins, also for the one after the last.
  template <class ColOf>
  __device__ __forceinline__ void load(const Parameter* parameter, ColOf col_of) {
#pragma unroll
    for (int pack = 0; pack < num_packs; pack += joined) {
      if constexpr (joined == 2) {
        kept[pack / 2] = {parameter, col_of(pack), col_of(pack + 1)};
      } else {
        kept[pack] = {parameter, col_of(pack)};
      }
    }
  }
  // stays_packed: unpack it for each row, which takes fewer registers. zero: see KeptParameter.
  template <class Compute>
  __device__ __forceinline__ void unpack(int pack, Compute (&values)[pack_size], float missing,
                                         bool stays_packed = true, unsigned int zero = 0) {
    if (pack % joined == 0 && stays_packed) kept[pack / joined].forget_unpacked();
    auto own = kept[pack / joined];
    own.unpack_after(zero);
    Compute all[joined * pack_size];
    own.unpack_to(all, missing);
#pragma unroll
    for (int at = 0; at < pack_size; ++at) values[at] = all[pack % joined * pack_size + at];
  }
};
