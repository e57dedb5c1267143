// The names of csrc/cuda/device.h under the emulator.
#pragma once

#include "cuda_emul.h"

namespace sapo::cuda {

template <class T>
using Shared = emul::Cell<T>;

#define SAPO_SHARED(Type, name) Type& name = emul::shared_variable<Type>(__LINE__)

inline void store_release(unsigned* to, unsigned x) {
  emul::give_way();
  emul::flush(*emul::machine.current, true);
  *to = x;
}

inline unsigned load_acquire(const unsigned* from) {
  emul::give_way();
  return *from;
}

inline unsigned add_acquire_release(unsigned* to, unsigned x) {
  emul::give_way();
  emul::flush(*emul::machine.current, true);
  const unsigned old = *to;
  *to += x;
  return old;
}

inline void store_payload(double* to, double x) { emul::machine.current->pending.emplace_back(to, x); }

inline double load_payload(const double* from) {
  emul::give_way();
  const auto& pending = emul::machine.current->pending;
  for (auto i = pending.rbegin(); i != pending.rend(); ++i) {
    if (i->first == from) return i->second;
  }
  return *from;
}

inline void spin_pause() { emul::give_way(); }

inline Vector load_streaming(const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof(Vector) != 0) emul::fail("a 16-byte load from an address that is no multiple of 16");
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline void store_streaming(void* to, const Vector& v) {
  if (reinterpret_cast<uintptr_t>(to) % sizeof(Vector) != 0) emul::fail("a 16-byte store to an address that is no multiple of 16");
  std::memcpy(to, &v, sizeof v);
}

inline float exp2_fast(float x) { return x < -126.0f ? 0.0f : std::exp2(x); }

inline float bits_to_float(uint32_t x) { return std::bit_cast<float>(x); }
inline uint32_t float_to_bits(float x) { return std::bit_cast<uint32_t>(x); }

inline float half_to_float(uint16_t x) { return static_cast<float>(std::bit_cast<_Float16>(x)); }
inline uint16_t float_to_half(float x) { return std::bit_cast<uint16_t>(static_cast<_Float16>(x)); }
inline uint16_t float_to_bfloat(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (x != x) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <float (*kWiden)(uint16_t)>
uint32_t larger_pairs(uint32_t x, uint32_t y) {
  const auto larger = [](uint32_t a, uint32_t b) {
    const float u = kWiden(static_cast<uint16_t>(a)), v = kWiden(static_cast<uint16_t>(b));
    return (u != u || v > u ? b : a) & 0xffffu;
  };
  return larger(x, y) | larger(x >> 16, y >> 16) << 16;
}
inline float bfloat_to_float(uint16_t x) { return bits_to_float(static_cast<uint32_t>(x) << 16); }
inline uint32_t larger_halves(uint32_t x, uint32_t y) { return larger_pairs<half_to_float>(x, y); }
inline uint32_t larger_bfloats(uint32_t x, uint32_t y) { return larger_pairs<bfloat_to_float>(x, y); }

inline void cluster_arrive_relaxed() { emul::cluster_arrive(false); }
inline void cluster_arrive() { emul::cluster_arrive(true); }
inline void cluster_wait(int line = __builtin_LINE()) { emul::cluster_wait(line); }

template <class T>
void store_remote(Shared<T>& cell, int rank, const T& x) {
  emul::give_way();
  emul::remote(cell, static_cast<unsigned>(rank)) = x;
}

}  // namespace sapo::cuda
