// ring_parameters.cuh -- weights or biases that a thread of a backward ring keeps for all rows
#pragma once
#include "parameter.cuh"
#include "ring.cuh"

// If there are many packs, the first of each thread are in shared memory and the others in
// registers. used: false if the kernel needs no parameters.
template <class Load, Tile tile, bool used>
struct RingParameters {
  using Shape = RingShape<tile>;
  using Kept = typename Load::template Kept<tile.pack_size>;
  static constexpr bool in_smem_too =
      used && Load::present && tile.pack_size * tile.packs_per_thread > 16;
  // All packs of wide weights. One pack of 16-bit weights remains in registers: that makes room for
  // a third stage.
  static constexpr int smem_packs =
      in_smem_too ? tile.packs_per_thread - (sizeof(Kept) <= 2 * tile.pack_size) : 0;
  static constexpr int smem_bytes = smem_packs * tile.threads_per_row * sizeof(Kept);

  Kept* in_smem;  // [smem_packs][threads_per_row], shared by all rows of the block
  Kept in_registers[tile.packs_per_thread - smem_packs + (smem_packs == tile.packs_per_thread)];
  Kept for_smem[smem_packs + 1];  // only until they are written to shared memory

  // Starts the loads. store_to_smem() ends them.
  __device__ __forceinline__ RingParameters(const Load& load, Slice cols, unsigned char* smem)
      : in_smem(reinterpret_cast<Kept*>(smem) + Shape::thread()) {
    if constexpr (!used) return;
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
      Kept kept{};
      if (Shape::in_part(pack, cols))
        kept = load.template keep<tile.pack_size>(cols.first_col + Shape::col(pack));
      if (pack < smem_packs) {
        for_smem[pack] = kept;
      } else {
        in_registers[pack - smem_packs] = kept;
      }
    }
  }
  // Called before ring_sync.
  __device__ __forceinline__ void store_to_smem() const {
    if constexpr (!used) return;
    if (Shape::group() > 0) return;
#pragma unroll
    for (int pack = 0; pack < smem_packs; ++pack)
      in_smem[pack * tile.threads_per_row] = for_smem[pack];
  }
  template <class Compute>
  __device__ __forceinline__ void unpack_to(int pack, Compute (&values)[tile.pack_size]) {
    if constexpr (!used) return;
    if (pack < smem_packs) {
      Load::unpack(in_smem[pack * tile.threads_per_row], values);
    } else {
      in_registers[pack - smem_packs].forget_unpacked();
      Load::unpack(in_registers[pack - smem_packs], values);
    }
  }
};
