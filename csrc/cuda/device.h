// The few things the kernels need beyond CUDA C++ itself. Under the emulator of the tests (SAPO_EMULATED) the same names come from there.
#pragma once

#include <cstdint>

namespace sapo::cuda {

inline constexpr unsigned kAll = 0xffffffffu;

// 16 bytes: the widest access to memory.
struct alignas(16) Vector {
  uint32_t word[4];
};

}  // namespace sapo::cuda

#if defined(SAPO_EMULATED)
#include "cuda_emul_device.h"
#else

#include <cuda_runtime.h>

namespace sapo::cuda {

// A cell of shared memory. The emulator's version finds two threads that touch one without a barrier between them.
template <class T>
using Shared = T;

#define SAPO_SHARED(Type, name) __shared__ Type name

// Between blocks: what is written before a release is seen after the acquire that reads it. Payloads go around the first-level cache.
__device__ __forceinline__ void store_release(unsigned* to, unsigned x) { asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory"); }

__device__ __forceinline__ unsigned load_acquire(const unsigned* from) {
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

__device__ __forceinline__ unsigned add_acquire_release(unsigned* to, unsigned x) {
  unsigned old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(to), "r"(x) : "memory");
  return old;
}

__device__ __forceinline__ void store_payload(double* to, double x) { __stcg(to, x); }
__device__ __forceinline__ double load_payload(const double* from) { return __ldcg(from); }

__device__ __forceinline__ void spin_pause() { __nanosleep(20); }

// What is read or written once need not stay in the caches.
__device__ __forceinline__ Vector load_streaming(const void* from) {
  const uint4 x = __ldcs(static_cast<const uint4*>(from));
  return {{x.x, x.y, x.z, x.w}};
}
__device__ __forceinline__ void store_streaming(void* to, const Vector& v) {
  __stcs(static_cast<uint4*>(to), make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]));
}

// 2 units in the last place; 0 below the smallest normal number.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float bits_to_float(uint32_t x) { return __uint_as_float(x); }
__device__ __forceinline__ uint32_t float_to_bits(float x) { return __float_as_uint(x); }

__device__ __forceinline__ float half_to_float(uint16_t x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
__device__ __forceinline__ uint16_t float_to_half(float x) {
  uint16_t y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ uint16_t float_to_bfloat(float x) {
  uint16_t y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

// Of two pairs of 16-bit numbers; a NaN loses.
__device__ __forceinline__ uint32_t larger_halves(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("max.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
__device__ __forceinline__ uint32_t larger_bfloats(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// Blocks of a cluster: sm_90 and later; the host launches no cluster on what came before.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Writes `x` where block `rank` of the cluster has its own `cell`.
template <class T>
__device__ __forceinline__ void store_remote(T& cell, int rank, const T& x) {
  static_assert(sizeof(T) % 4 == 0);
  uint32_t words[sizeof(T) / 4], to;
  memcpy(words, &x, sizeof(T));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(&cell))), "r"(rank));
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 4); ++i) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to + 4 * i), "r"(words[i]) : "memory");
  }
}
#else
__device__ __forceinline__ void cluster_arrive_relaxed() { __trap(); }
__device__ __forceinline__ void cluster_arrive() { __trap(); }
__device__ __forceinline__ void cluster_wait() { __trap(); }
template <class T>
__device__ __forceinline__ void store_remote(T&, int, const T&) {
  __trap();
}
#endif

}  // namespace sapo::cuda

#endif
