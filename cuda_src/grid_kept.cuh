// grid_kept.cuh -- weights and biases of a block's columns, which path `grid` keeps for all rows
//
// A block has the same columns of all rows. Read again for each row, they would take as much of the
// L2 cache's bandwidth as the rows.
#pragma once
#include "grid_shape.cuh"

// Those of a thread's first packs are in registers, of others in shared memory as far as it goes.
// Any others are loaded for each row. load(col): of one pack.
template <class Kept, Tile tile, int registers, int smem_bytes>
struct GridKept {
  using Shape = GridShape<tile>;
  static constexpr int most(int packs, int limit) {
    return packs < 0 ? 0 : packs < limit ? packs : limit;
  }
  static constexpr int kept_size = sizeof(Kept);
  static constexpr int in_registers = most(registers * 4 / kept_size, Shape::num_packs);
  static constexpr int in_smem =
      most(smem_bytes / (Shape::num_workers * kept_size), Shape::num_packs - in_registers);

  Kept* smem;  // [in_smem][num_workers], from this thread on
  Kept kept[in_registers + (in_registers == 0)];

  template <class Load>
  __device__ __forceinline__ GridKept(unsigned char* smem, Slice cols, Load load)
      : smem(reinterpret_cast<Kept*>(smem) + threadIdx.x) {
    if (!Shape::works()) return;
#pragma unroll
    for (int pack = 0; pack < in_registers + in_smem; ++pack) {
      if (!Shape::present(pack, cols)) continue;
      if (pack < in_registers) {
        kept[pack] = load(Shape::col(pack));
      } else {
        this->smem[(pack - in_registers) * Shape::num_workers] = load(Shape::col(pack));
      }
    }
  }
  // The compiler knows the number of the pack.
  template <class Load>
  __device__ __forceinline__ Kept of(int pack, int col, Load load) {
    if (pack < in_registers) {
      kept[pack].forget_unpacked();
      return kept[pack];
    }
    if (pack < in_registers + in_smem) return smem[(pack - in_registers) * Shape::num_workers];
    return load(col);
  }
};
