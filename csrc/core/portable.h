// What lets one header serve g++ and nvcc.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define SAPO_HD __host__ __device__ __forceinline__
#else
#define SAPO_HD inline
#endif

namespace sapo {

// Their overloads for float, which plain C names do not have everywhere.
using std::exp;
using std::expm1;
using std::log1p;

}  // namespace sapo
