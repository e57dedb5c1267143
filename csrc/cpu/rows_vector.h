// Floats in a register, loaded from and stored to float32, bfloat16 and float16: 16 of them with AVX-512, 8 with AVX2, else 8 in plain C++ for the compiler to
// place in whatever vectors there are.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

#include "vector.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define SAPO_ROWS_512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define SAPO_ROWS_256 1
#endif

namespace sapo::cpu::SAPO_ISA {

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

// --- one number

inline float widen(float x) { return x; }
inline float widen(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
inline float widen(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, exponent = x.bits >> 10 & 31, mantissa = x.bits & 0x3ff;
  if (exponent == 0) {
    const float tiny = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -tiny : tiny;
  }
  const uint32_t wide = exponent == 31 ? 255 : exponent + 112;
  return std::bit_cast<float>(sign | wide << 23 | mantissa << 13);
}

// Rounded to nearest, ties to even.
template <class T>
T narrow(float x);
template <>
inline float narrow<float>(float x) {
  return x;
}
template <>
inline BFloat16 narrow<BFloat16>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (x != x) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
template <>
inline Half narrow<Half>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};
  if (size >= 0x477ff000) return {static_cast<uint16_t>(sign | 0x7c00)};  // 65,520 and beyond
  if (size < 0x38800000) {  // below 2^-14: multiples of 2^-24, rounded by the addition to 0.5
    const float shifted = std::bit_cast<float>(size) + 0.5f;
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000))};
  }
  return {static_cast<uint16_t>(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13)};
}

// --- vectors

#if defined(SAPO_ROWS_512)

inline constexpr int kWidth = 16;
using Floats = __m512;

SAPO_INLINE Floats all(float x) { return _mm512_set1_ps(x); }
SAPO_INLINE Floats get(const float* from) { return _mm512_loadu_ps(from); }
SAPO_INLINE Floats get(const BFloat16* from) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))), 16));
}
SAPO_INLINE Floats get(const Half* from) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
SAPO_INLINE void put(float* to, Floats x) { _mm512_storeu_ps(to, x); }
SAPO_INLINE void put(BFloat16* to, Floats x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
}
SAPO_INLINE void put(Half* to, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
SAPO_INLINE Floats fused(Floats x, Floats y, Floats z) { return _mm512_fmadd_ps(x, y, z); }
SAPO_INLINE Floats maximum(Floats x, Floats y) { return _mm512_max_ps(x, y); }  // y where either is NaN
SAPO_INLINE Floats nearest(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
SAPO_INLINE Floats times_two_to(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }  // n whole
// Zero where `at` is zero; `count` gains how many those are.
SAPO_INLINE Floats drop_at_zero(Floats x, Floats at, int64_t& count) {
  const __mmask16 zero = _mm512_cmp_ps_mask(at, _mm512_setzero_ps(), _CMP_EQ_OQ);
  count += __builtin_popcount(zero);
  return _mm512_mask_mov_ps(x, zero, _mm512_setzero_ps());
}

#elif defined(SAPO_ROWS_256)

inline constexpr int kWidth = 8;
using Floats = __m256;

SAPO_INLINE Floats all(float x) { return _mm256_set1_ps(x); }
SAPO_INLINE Floats get(const float* from) { return _mm256_loadu_ps(from); }
SAPO_INLINE Floats get(const BFloat16* from) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 16));
}
SAPO_INLINE Floats get(const Half* from) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))); }
SAPO_INLINE void put(float* to, Floats x) { _mm256_storeu_ps(to, x); }
SAPO_INLINE void put(BFloat16* to, Floats x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff)));
  const __m256 quiet = _mm256_or_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x400000)));
  const __m256 kept = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), quiet, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(kept), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0b1000);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
}
SAPO_INLINE void put(Half* to, Floats x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
SAPO_INLINE Floats fused(Floats x, Floats y, Floats z) { return _mm256_fmadd_ps(x, y, z); }
SAPO_INLINE Floats maximum(Floats x, Floats y) { return _mm256_max_ps(x, y); }  // y where either is NaN
SAPO_INLINE Floats nearest(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// n whole, not below -126 where the result matters: smaller powers of two count as zero.
SAPO_INLINE Floats times_two_to(Floats x, Floats n) {
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  const __m256 normal = _mm256_cmp_ps(n, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ);  // and NaN, which x carries
  return _mm256_and_ps(normal, _mm256_mul_ps(x, _mm256_castsi256_ps(power)));
}
SAPO_INLINE Floats drop_at_zero(Floats x, Floats at, int64_t& count) {
  const __m256 zero = _mm256_cmp_ps(at, _mm256_setzero_ps(), _CMP_EQ_OQ);
  count += __builtin_popcount(_mm256_movemask_ps(zero));
  return _mm256_andnot_ps(zero, x);
}

#else

inline constexpr int kWidth = 8;
struct Floats {
  float lane[kWidth];
  float operator[](int i) const { return lane[i]; }
};

template <class F>
SAPO_INLINE Floats each(F f) {
  Floats out;
  for (int i = 0; i < kWidth; ++i) out.lane[i] = f(i);
  return out;
}
SAPO_INLINE Floats operator+(Floats x, Floats y) {
  return each([&](int i) { return x[i] + y[i]; });
}
SAPO_INLINE Floats operator-(Floats x, Floats y) {
  return each([&](int i) { return x[i] - y[i]; });
}
SAPO_INLINE Floats operator*(Floats x, Floats y) {
  return each([&](int i) { return x[i] * y[i]; });
}
SAPO_INLINE Floats& operator+=(Floats& x, Floats y) { return x = x + y; }
SAPO_INLINE Floats all(float x) {
  return each([&](int) { return x; });
}
template <class T>
SAPO_INLINE Floats get(const T* from) {
  return each([&](int i) { return widen(from[i]); });
}
template <class T>
SAPO_INLINE void put(T* to, Floats x) {
  for (int i = 0; i < kWidth; ++i) to[i] = narrow<T>(x[i]);
}
SAPO_INLINE Floats fused(Floats x, Floats y, Floats z) { return x * y + z; }
SAPO_INLINE Floats maximum(Floats x, Floats y) {
  return each([&](int i) { return x[i] > y[i] ? x[i] : y[i]; });
}
SAPO_INLINE Floats nearest(Floats x) {
  return each([&](int i) { return (x[i] + 0x1.8p23f) - 0x1.8p23f; });
}
SAPO_INLINE Floats times_two_to(Floats x, Floats n) {
  return each([&](int i) {
    // Converting a NaN is undefined; one is carried by x.
    const int32_t whole = static_cast<int32_t>(n[i] >= -126.0f ? n[i] : -127.0f);
    const float power = std::bit_cast<float>(static_cast<uint32_t>(whole + 127) << 23);  // 2^-127 becomes 0
    return x[i] * power;
  });
}
SAPO_INLINE Floats drop_at_zero(Floats x, Floats at, int64_t& count) {
  for (int i = 0; i < kWidth; ++i) count += at[i] == 0.0f;
  return each([&](int i) { return at[i] == 0.0f ? 0.0f : x[i]; });
}

#endif

// exp(x) for x in [-128, 0]: reduced by multiples of ln 2 in two parts, a polynomial of degree 6 on the rest; within 1 unit in the last place. Results below
// float's smallest normal number may be 0. A NaN passes.
SAPO_INLINE Floats exponential(Floats x) {
  const Floats n = nearest(x * all(0x1.715476p+0f));
  const Floats f = fused(n, all(-0x1.7f7d1cp-20f), fused(n, all(-0x1.62e4p-1f), x));
  Floats p = all(0x1.6850e4p-10f);
  p = fused(p, f, all(0x1.123bccp-7f));
  p = fused(p, f, all(0x1.555b98p-5f));
  p = fused(p, f, all(0x1.55548ep-3f));
  p = fused(p, f, all(0x1.fffff8p-2f));
  p = fused(p, f, all(1.0f));
  p = fused(p, f, all(1.0f));
  return times_two_to(p, n);
}

}  // namespace sapo::cpu::SAPO_ISA
