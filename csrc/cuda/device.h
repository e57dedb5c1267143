// The few things the kernels need beyond CUDA C++ itself. Under the emulator of the tests (SAPO_EMULATED) the same names come from there.
#pragma once

#if defined(SAPO_EMULATED)
#include "cuda_emul.h"
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

}  // namespace sapo::cuda

#endif
