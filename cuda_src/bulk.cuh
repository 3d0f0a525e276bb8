// bulk.cuh -- the copy engine: one thread moves a whole piece of a row (PTX ISA: cp.async.bulk, mbarrier; sm_90+)
//
// bulk_barrier_init(barrier)             one arrival a phase; then synchronise the block before use
// bulk_load(smem, global, bytes, barrier) one thread: announce the bytes, start the copy. 16-byte aligned, 16-byte sized
// bulk_wait(barrier, phase)              all threads: until the phase's bytes have landed; phase counts 0, 1, 2, ...
// bulk_reuse()                           each thread, before a barrier after which a bulk copy overwrites what it read
#pragma once

#ifdef CUPYNORM_ON_CPU

__device__ __forceinline__ void bulk_barrier_init(unsigned long long* barrier) { on_cpu::mbarrier_init(barrier, 1); }
__device__ __forceinline__ void bulk_load(void* smem, const void* global, unsigned bytes, unsigned long long* barrier) {
  on_cpu::mbarrier_expect(barrier, bytes);
  on_cpu::bulk_load(smem, global, bytes, barrier);
}
__device__ __forceinline__ void bulk_wait(unsigned long long* barrier, unsigned phase) {
  on_cpu::mbarrier_wait(barrier, phase & 1);
}
__device__ __forceinline__ void bulk_reuse() { on_cpu::fence_proxy_async(); }

#else

__device__ __forceinline__ unsigned smem_address(const void* smem) {
  return static_cast<unsigned>(__cvta_generic_to_shared(smem));
}
__device__ __forceinline__ void bulk_barrier_init(unsigned long long* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(smem_address(barrier))
               : "memory");
}
__device__ __forceinline__ void bulk_load(void* smem, const void* global, unsigned bytes, unsigned long long* barrier) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%3], %2;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_address(smem)),
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
__device__ __forceinline__ void bulk_reuse() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#endif
