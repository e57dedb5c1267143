// What lets one header serve g++ and nvcc.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define SAPO_HD __host__ __device__ __forceinline__
#else
#define SAPO_HD inline
#endif
