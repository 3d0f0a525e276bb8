// warpgroup.cuh -- PTX for a warpgroup: its registers, and products of 64 x 16 by 16 x 256
//
// PTX ISA: setmaxnreg, wgmma (sm_90a), with plain C++ twins for the CPU. Operands may not be
// touched before products_wait.
//
// keep_registers<n>()       the threads of a warpgroup give back registers, down to n
// take_registers<n>()       or wait for more, up to n
// products_begin()          before products, after registers of theirs were written
// multiply(d, x, weight, adds)   d = x weight^T, or += with adds (below)
// product_operand(smem)     16 columns of a swizzled tile, described for wgmma
// products_commit()         what was started since the last commit becomes a group
// products_wait<pending>()  until at most `pending` groups are not done
#pragma once
#include "bulk.cuh"
#include "convert.cuh"

#ifdef CUPYNORM_ON_CPU

template <int count>
__device__ __forceinline__ void keep_registers() {}
template <int count>
__device__ __forceinline__ void take_registers() {}
__device__ __forceinline__ unsigned smem_address(const void* smem) {
  return on_cpu::smem_address(smem);
}
__device__ __forceinline__ void products_begin() {}
__device__ __forceinline__ void products_commit() { on_cpu::products_commit(); }
template <int pending>
__device__ __forceinline__ void products_wait() {
  on_cpu::products_wait(pending);
}
template <class T>
__device__ __forceinline__ void multiply(float (&d)[128], const unsigned (&a)[4],
                                         unsigned long long weight, bool adds) {
  on_cpu::multiply(d, a, 0, weight, adds, is_same<T, __nv_bfloat16>);
}
template <class T>
__device__ __forceinline__ void multiply(float (&d)[128], unsigned long long x,
                                         unsigned long long weight, bool adds) {
  on_cpu::multiply(d, nullptr, x, weight, adds, is_same<T, __nv_bfloat16>);
}

#else

template <int count>
__device__ __forceinline__ void keep_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int pending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// multiply<T>(d, x, weight, adds): d = x weight^T, or += with adds. T: the type of the elements.
// weight: an operand of 256 rows; x: one of 64 rows, or registers a.
// Warp w has rows 16 w to 16 w + 15, lane l of it rows l / 4 and l / 4 + 8 of these: of the first,
// a[0] has columns 2 (l % 4) and the next, a[2] those 8 further, d[4 j] and d[4 j + 1] columns
// 8 j + 2 (l % 4) and the next. a[1], a[3], d[4 j + 2] and d[4 j + 3] are those of the second.

// The type of a, as PTX names it.
template <class T>
struct PtxType;
template <>
struct PtxType<__nv_bfloat16> {
  static constexpr char name[] = ".bf16";
};
template <>
struct PtxType<__half> {
  static constexpr char name[] = ".f16";
};

// Where x is: in registers, or in shared memory, where the last flag says that rows are contiguous.
struct InRegisters {
  static constexpr char name[] = "{x0, x1, x2, x3}", flags[] = "1, 1, 0";
};
struct InSmem {
  static constexpr char name[] = "tile", flags[] = "1, 1, 0, 0";
};

template <class T, class Place>
__device__ __forceinline__ void multiply(float (&d)[128], const unsigned (&a)[4],
                                         unsigned long long x, unsigned long long weight,
                                         bool adds) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %134, 0;\n"
      ".reg .b32 x0, x1, x2, x3;\n.reg .b64 tile;\nmov.b64 tile, %132;\n"
      "mov.b32 x0, %128;\nmov.b32 x1, %129;\nmov.b32 x2, %130;\nmov.b32 x3, %131;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32%135%135 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
      "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "
      "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
      "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, "
      "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "
      "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "
      "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "
      "%126, %127"
      "}, %136, %133, adds, %137;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]),
        "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]),
        "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]),
        "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]),
        "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]),
        "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]),
        "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]),
        "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]),
        "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "l"(weight),
        "r"(static_cast<int>(adds)), "C"(PtxType<T>::name), "C"(Place::name), "C"(Place::flags));
}
template <class T>
__device__ __forceinline__ void multiply(float (&d)[128], const unsigned (&a)[4],
                                         unsigned long long weight, bool adds) {
  multiply<T, InRegisters>(d, a, 0, weight, adds);
}
template <class T>
__device__ __forceinline__ void multiply(float (&d)[128], unsigned long long x,
                                         unsigned long long weight, bool adds) {
  multiply<T, InSmem>(d, {}, x, weight, adds);
}

#endif

// The operand of a product is 16 columns of a tile, whose rows have 128 or 32 bytes; the 16-byte
// units of each 8 rows are swizzled. In units of 16 bytes: where it begins, and how far 8 rows are
// from the next 8. The offset in a row, a multiple of 32 bytes, may be added to the address.
template <unsigned row_bytes = 128>
__device__ __forceinline__ unsigned long long product_operand(const void* smem) {
  constexpr unsigned long long stride = row_bytes / 2, swizzle = row_bytes == 128 ? 1 : 3;
  return (smem_address(smem) & 0x3ffff) >> 4 | 1ull << 16 | stride << 32 | swizzle << 62;
}
