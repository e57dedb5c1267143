// Four doubles in a register, loaded from and stored to float32. Only for AVX2 with fused multiply-add; other processors run the scalar loops
// (gcc turns generic vectors of this width into scalar code far slower than those).
#pragma once

#define SAPO_INLINE inline __attribute__((always_inline))

#if defined(__AVX2__) && defined(__FMA__)
#define SAPO_VECTORS 1

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace sapo::cpu::SAPO_ISA {

inline constexpr int kLanes = 4;
using Doubles = __m256d;  // gcc and clang give it + - * and indexing

SAPO_INLINE Doubles splat(double x) { return _mm256_set1_pd(x); }
SAPO_INLINE Doubles load(const float* from) { return _mm256_cvtps_pd(_mm_loadu_ps(from)); }
SAPO_INLINE void store(float* to, Doubles x) { _mm_storeu_ps(to, _mm256_cvtpd_ps(x)); }
SAPO_INLINE Doubles larger(Doubles x, Doubles y) { return _mm256_max_pd(y, x); }  // x where y is NaN
SAPO_INLINE Doubles magnitude(Doubles x) { return _mm256_andnot_pd(splat(-0.0), x); }

// All ones where the flag is set.
SAPO_INLINE Doubles flags(const uint8_t* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof four);
  return _mm256_castsi256_pd(_mm256_cmpgt_epi64(_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four)), _mm256_setzero_si256()));
}
SAPO_INLINE Doubles where(Doubles flags, Doubles x) { return _mm256_and_pd(flags, x); }  // else 0
SAPO_INLINE int count(Doubles flags) { return __builtin_popcount(_mm256_movemask_pd(flags)); }

// x[2], x[3], 0, 0 and x[1], x[2], x[3], 0
SAPO_INLINE Doubles shift_two(Doubles x) { return _mm256_permute2f128_pd(x, x, 0x81); }
SAPO_INLINE Doubles shift_one(Doubles x) { return _mm256_shuffle_pd(x, shift_two(x), 0b0101); }

}  // namespace sapo::cpu::SAPO_ISA

#endif
