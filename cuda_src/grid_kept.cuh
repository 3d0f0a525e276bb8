// grid_kept.cuh -- weights and biases of a block's columns, which path `grid` keeps for all rows
//
// A block has the same columns of all rows. Read again for each row, they would take as much of the
// L2 cache's bandwidth as the rows.
#pragma once
#include "grid_row.cuh"

// Those of a thread's first packs are in registers, of others in shared memory as far as it goes.
// Any others are loaded for each row. load(col): of one pack.
template <class Kept, Tile tile, int registers, int smem_bytes>
struct KeptOfPacks {
  using Shape = GridShape<tile>;
  static constexpr int most(int packs, int limit) {
    return packs < 0 ? 0 : packs < limit ? packs : limit;
  }
  static constexpr int kept_size = sizeof(Kept);
  static constexpr int in_registers = most(registers * 4 / kept_size, tile.packs_per_thread);
  static constexpr int in_smem =
      most(smem_bytes / (Shape::num_workers * kept_size), tile.packs_per_thread - in_registers);

  Kept* smem;  // [in_smem][num_workers], from this thread on
  Kept kept[in_registers + (in_registers == 0)];

  template <class Load>
  __device__ __forceinline__ KeptOfPacks(unsigned char* smem, Slice cols, Load load)
      : smem(reinterpret_cast<Kept*>(smem) + threadIdx.x) {
    if (!Shape::works()) return;
#pragma unroll
    for (int pack = 0; pack < in_registers + in_smem; ++pack) {
      const int col = pack * Shape::step + static_cast<int>(threadIdx.x) * tile.pack_size;
      if (col >= cols.size()) continue;
      if (pack < in_registers) {
        kept[pack] = load(col);
      } else {
        this->smem[(pack - in_registers) * Shape::num_workers] = load(col);
      }
    }
  }
  template <bool in_place, class Load>
  __device__ __forceinline__ Kept of(PackNumber<in_place> pack, int col, Load load) {
    if constexpr (in_place) {
      if (pack.number < in_registers) {
        kept[pack.number].forget_unpacked();
        return kept[pack.number];
      }
      if (pack.number < in_registers + in_smem)
        return smem[(pack.number - in_registers) * Shape::num_workers];
    }
    return load(col);
  }
};
