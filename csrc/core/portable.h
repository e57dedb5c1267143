// What lets one header serve g++ and nvcc.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#if defined(__CUDACC__)
#define SAPO_HD __host__ __device__ __forceinline__
#else
#define SAPO_HD inline
#endif

namespace sapo {

// Constants, because device code may not call the functions.
template <class Real>
inline constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
template <class Real>
inline constexpr Real kNaN = std::numeric_limits<Real>::quiet_NaN();

// Their overloads for float, which plain C names do not have everywhere.
using std::exp;
using std::expm1;
using std::log1p;

}  // namespace sapo
