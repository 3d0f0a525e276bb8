// grid_kept.cuh -- weights and biases of a block's columns, which path `grid` keeps for all rows
//
// A block has the same columns of all rows. Read again for each row, they would take as much of the
// L2 cache's bandwidth as the rows.
#pragma once
#include "grid_shape.cuh"

// Parameters of a thread's first packs are in registers, of the next packs in shared memory as far
// as there is room. Those of the last packs are fetched again for each row: at the start of a step,
// before the thread waits for its copies. Source: a Store or a LoadParameter. uses: in one step, of
// different packs.
template <class Source, Tile tile, int registers, int smem_bytes, int uses = 1>
struct GridKept {
  using Shape = GridShape<tile>;
  using Kept = typename Source::template Kept<tile.pack_size>;
  static constexpr int kept_bytes = sizeof(Kept);
  static constexpr int in_registers =
      Shape::keeps_rows ? Shape::clamp(registers * 4 / kept_bytes, 0, Shape::num_packs) : 0;
  static constexpr int in_smem = Shape::clamp(smem_bytes / (Shape::num_workers * kept_bytes), 0,
                                              Shape::num_packs - in_registers);
  static constexpr bool fetches = in_registers + in_smem < Shape::num_packs;

  const Source& source;
  Slice cols;
  Kept* smem;  // [in_smem][num_workers], from this thread on
  Kept kept[in_registers + (in_registers == 0)];
  Kept fetched[uses][Shape::packs_at_once];

  __device__ __forceinline__ GridKept(const Source& source, Slice cols, unsigned char* smem)
      : source(source), cols(cols), smem(reinterpret_cast<Kept*>(smem) + threadIdx.x) {}
  __device__ __forceinline__ void load_all() {
#pragma unroll
    for (int pack = 0; pack < in_registers + in_smem; ++pack) {
      if (!Shape::in_slice(pack, cols)) continue;
      if (pack < in_registers) {
        kept[pack] = load(pack);
      } else {
        smem[(pack - in_registers) * Shape::num_workers] = load(pack);
      }
    }
  }
  // The number of the pack is a constant of an unrolled loop: one branch remains.
  __device__ __forceinline__ void fetch(int pack, int use = 0) {
    if (pack >= in_registers + in_smem) fetched[use][pack % Shape::packs_at_once] = load(pack);
  }
  __device__ __forceinline__ Kept of(int pack, int use = 0) {
    if (pack < in_registers) {
      kept[pack].forget_unpacked();
      return kept[pack];
    }
    if (pack < in_registers + in_smem) return smem[(pack - in_registers) * Shape::num_workers];
    return fetched[use][pack % Shape::packs_at_once];
  }
  // Of any pack, if none is in registers.
  __device__ __forceinline__ Kept of_any(int pack) const {
    return pack < in_smem ? smem[pack * Shape::num_workers] : load(pack);
  }

 private:
  __device__ __forceinline__ Kept load(int pack) const {
    return source.template keep<tile.pack_size>(cols.first_col + Shape::col(pack));
  }
};
