// What lets one header serve g++, nvcc and the CPU emulator of the tests.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__) || defined(SAPO_EMULATED)
#define SAPO_HD __host__ __device__ __forceinline__
#else
#define SAPO_HD inline
#endif
