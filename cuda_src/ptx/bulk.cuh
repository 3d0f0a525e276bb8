// bulk.cuh -- PTX for the copy engine: one thread moves a whole piece of a row
//
// PTX ISA: cp.async.bulk, mbarrier, st.async (sm_90), with plain C++ twins for the CPU.
//
// bulk_barrier_init(barrier, arrivals)      one thread; then synchronise the threads that use it
// bulk_arrive(barrier)                      one arrival of the phase; releases earlier writes
// bulk_expect(barrier, bytes)               the same, and announces bytes of copies or sends
// bulk_copy(smem, global, bytes, barrier)   one thread: starts a copy of aligned units of 16 bytes
// bulk_wait(barrier, phase)                 until the phase is complete; phase counts 0, 1, 2, ...
// cluster_send(at, value, barrier, rank)    a float to `at` in block `rank`, 4 bytes to its barrier
// smem_reload(smem, words)                  loads 16 bytes again, though the compiler may have them
#pragma once

#ifdef CUPYNORM_ON_CPU

__device__ __forceinline__ void bulk_barrier_init(unsigned long long* barrier,
                                                  unsigned arrivals = 1) {
  on_cpu::mbarrier_init(barrier, arrivals);
}
__device__ __forceinline__ void bulk_arrive(unsigned long long* barrier) {
  on_cpu::mbarrier_arrive(barrier);
}
__device__ __forceinline__ void bulk_expect(unsigned long long* barrier, unsigned bytes) {
  on_cpu::mbarrier_expect(barrier, bytes);
}
__device__ __forceinline__ void bulk_copy(void* smem, const void* global, unsigned bytes,
                                          unsigned long long* barrier) {
  on_cpu::bulk_load(smem, global, bytes, barrier);
}
__device__ __forceinline__ void bulk_wait(unsigned long long* barrier, unsigned phase) {
  on_cpu::mbarrier_wait(barrier, phase & 1);
}

__device__ __forceinline__ void cluster_send(float* at, float value, unsigned long long* barrier,
                                             unsigned rank) {
  on_cpu::cluster_send(at, value, barrier, rank);
}

__device__ __forceinline__ void smem_reload(const void* smem, unsigned (&words)[4]) {
#pragma unroll
  for (int at = 0; at < 4; ++at) words[at] = static_cast<const unsigned*>(smem)[at];
}

#else

__device__ __forceinline__ unsigned smem_address(const void* smem) {
  return static_cast<unsigned>(__cvta_generic_to_shared(smem));
}
__device__ __forceinline__ void smem_reload(const void* smem, unsigned (&words)[4]) {
  asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(smem_address(smem)));
}
__device__ __forceinline__ void bulk_barrier_init(unsigned long long* barrier,
                                                  unsigned arrivals = 1) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], %1;\nfence.mbarrier_init.release.cluster;" ::"r"(
          smem_address(barrier)),
      "r"(arrivals)
      : "memory");
}
__device__ __forceinline__ void bulk_arrive(unsigned long long* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}
__device__ __forceinline__ void bulk_expect(unsigned long long* barrier, unsigned bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)),
      "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void bulk_copy(void* smem, const void* global, unsigned bytes,
                                          unsigned long long* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem_address(smem)),
      "l"(global), "r"(bytes), "r"(smem_address(barrier))
      : "memory");
}
__device__ __forceinline__ void bulk_wait(unsigned long long* barrier, unsigned phase) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra landed;\nbra again;\nlanded:\n}" ::"r"(smem_address(barrier)),
      "r"(phase & 1)
      : "memory");
}
__device__ __forceinline__ void cluster_send(float* at, float value, unsigned long long* barrier,
                                             unsigned rank) {
  asm volatile(
      "{\n.reg .b32 to, barrier;\n"
      "mapa.shared::cluster.u32 to, %0, %3;\n"
      "mapa.shared::cluster.u32 barrier, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [to], %1, [barrier];\n}" ::"r"(
          smem_address(at)),
      "f"(value), "r"(smem_address(barrier)), "r"(rank)
      : "memory");
}

#endif
