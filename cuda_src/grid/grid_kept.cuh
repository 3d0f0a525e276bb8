// grid_kept.cuh -- weights and biases of a block's columns, which path `grid` keeps for all rows
//
// A block has the same columns of all rows. Read again for each row, they would take as much of the
// L2 cache's bandwidth as the rows.
#pragma once
#include "grid_shape.cuh"

// Those of a thread's first packs are in registers, of others in shared memory as far as it goes.
// Any others are loaded for each row. Source: a Store or a LoadParameter.
template <class Source, Tile tile, int registers, int smem_bytes>
struct GridKept {
  using Shape = GridShape<tile>;
  using Kept = typename Source::template Kept<tile.pack_size>;
  static constexpr int most(int packs, int limit) {
    return packs < 0 ? 0 : packs < limit ? packs : limit;
  }
  static constexpr int in_registers =
      most(registers * 4 / static_cast<int>(sizeof(Kept)), Shape::num_packs);
  static constexpr int in_smem =
      most(smem_bytes / (Shape::num_workers * static_cast<int>(sizeof(Kept))),
           Shape::num_packs - in_registers);

  const Source& source;
  Slice cols;
  Kept* smem;  // [in_smem][num_workers], from this thread on
  Kept kept[in_registers + (in_registers == 0)];

  __device__ __forceinline__ GridKept(const Source& source, Slice cols, unsigned char* smem)
      : source(source), cols(cols), smem(reinterpret_cast<Kept*>(smem) + threadIdx.x) {}
  __device__ __forceinline__ void load_all() {
#pragma unroll
    for (int pack = 0; pack < in_registers + in_smem; ++pack) {
      if (!Shape::present(pack, cols)) continue;
      if (pack < in_registers) {
        kept[pack] = load(pack);
      } else {
        smem[(pack - in_registers) * Shape::num_workers] = load(pack);
      }
    }
  }
  // The compiler knows the number of the pack.
  __device__ __forceinline__ Kept of(int pack) {
    if (pack < in_registers) {
      kept[pack].forget_unpacked();
      return kept[pack];
    }
    if (pack < in_registers + in_smem) return smem[(pack - in_registers) * Shape::num_workers];
    return load(pack);
  }

 private:
  __device__ __forceinline__ Kept load(int pack) const {
    return source.template keep<tile.pack_size>(cols.first_col + Shape::col(pack));
  }
};
