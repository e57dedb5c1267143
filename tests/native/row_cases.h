// Random problems of the row pass, the right answer in extended precision, and the comparison.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cuda/rows.h"

namespace cases {

using sapo::cuda::Matrix;
using sapo::cuda::RowsProblem;
using sapo::cuda::Type;

using Random = std::mt19937_64;
using Real = long double;

inline int64_t below(Random& random, int64_t n) { return n <= 0 ? 0 : static_cast<int64_t>(random() % static_cast<uint64_t>(n)); }
inline bool chance(Random& random, double p) { return std::uniform_real_distribution<double>()(random) < p; }

inline int size_of(Type type) { return type == Type::float32 ? 4 : 2; }

inline float read(Type type, const char* at) {
  uint32_t word = 0;
  std::memcpy(&word, at, static_cast<size_t>(size_of(type)));
  if (type == Type::float32) return std::bit_cast<float>(word);
  if (type == Type::bfloat16) return std::bit_cast<float>(word << 16);
  return static_cast<float>(std::bit_cast<_Float16>(static_cast<uint16_t>(word)));
}

inline void write(Type type, char* at, float x) {
  uint32_t word = std::bit_cast<uint32_t>(x);
  if (type == Type::bfloat16) word = x != x ? 0x7fffu : (word + 0x7fff + (word >> 16 & 1)) >> 16;
  if (type == Type::float16) word = std::bit_cast<uint16_t>(static_cast<_Float16>(x));
  std::memcpy(at, &word, static_cast<size_t>(size_of(type)));
}

// A matrix somewhere inside a buffer; what lies between its entries must not be written.
struct Buffer {
  Type type;
  int64_t height, width, row_stride, column_stride, begin;
  std::vector<uint64_t> memory;  // aligned to 16 bytes by the allocator

  Buffer(Type type, int64_t height, int64_t width, Random& random) : type(type), height(height), width(width) {
    column_stride = chance(random, 0.15) ? 2 : 1;
    row_stride = width * column_stride + (chance(random, 0.5) ? below(random, 20) : 0);
    if (chance(random, 0.4)) row_stride = (row_stride + 7) / 8 * 8;
    begin = chance(random, 0.5) ? 0 : below(random, 17);
    memory.resize(static_cast<size_t>((begin + height * row_stride + 16) * size_of(type) / 8 + 1), 0x5a5a5a5a5a5a5a5au);
  }

  char* at(int64_t row, int64_t column) {
    return reinterpret_cast<char*>(memory.data()) + (begin + row * row_stride + column * column_stride) * size_of(type);
  }
  float get(int64_t row, int64_t column) { return read(type, at(row, column)); }
  void set(int64_t row, int64_t column, float x) { write(type, at(row, column), x); }
  Matrix matrix() { return {at(0, 0), row_stride, column_stride}; }
};

struct Case {
  Type type;
  int64_t count, height;
  int width;
  bool in_place, by_rows, distinct = true;
  Buffer logits, out;
  std::vector<int64_t> rows, actions;
  int plus, minus;
  float temperature;
  std::vector<float> old, advantages, weights, ref;
  sapo::PolicyLoss<float> loss;
  double scale;
  // For `grad` alone.
  std::vector<float> a, b, same;
  std::vector<int64_t> first;

  int64_t row(int64_t i) const { return by_rows ? rows[static_cast<size_t>(i)] : i; }
};

// What a call leaves behind.
struct Result {
  std::vector<float> logprob, top, log_sum, spread;
  Buffer logits, out;

  explicit Result(const Case& c)
      : logprob(static_cast<size_t>(c.count), -7e33f), top(logprob), log_sum(logprob), spread(logprob), logits(c.logits), out(c.out) {}

  bool same_bits(const Result& other) const {
    const auto same = [](const auto& x, const auto& y) { return x.empty() || std::memcmp(x.data(), y.data(), sizeof x[0] * x.size()) == 0; };
    return same(logprob, other.logprob) && same(top, other.top) && same(log_sum, other.log_sum) && same(spread, other.spread) &&
           same(logits.memory, other.logits.memory) && same(out.memory, other.out.memory);
  }
};

inline RowsProblem problem_of(Case& c, Result& r) {
  const auto or_null = [](const auto& v) { return v.empty() ? nullptr : v.data(); };
  RowsProblem p{};
  p.type = c.type;
  p.count = c.count;
  p.height = c.height;
  p.width = c.width;
  p.logits = r.logits.matrix();
  p.out = c.in_place ? p.logits : r.out.matrix();
  p.rows = c.by_rows ? c.rows.data() : nullptr;
  p.actions = c.actions.data();
  p.plus = c.plus;
  p.minus = c.minus;
  p.temperature = c.temperature;
  p.logprob = r.logprob.data();
  p.top = r.top.data();
  p.log_sum = r.log_sum.data();
  p.spread = r.spread.data();
  p.a = or_null(c.a);
  p.b = or_null(c.b);
  p.same = or_null(c.same);
  p.first = or_null(c.first);
  p.tokens = {or_null(c.old), c.advantages.data(), or_null(c.weights), or_null(c.ref)};
  p.loss = c.loss;
  p.scale = &c.scale;
  return p;
}

inline Case random_case(Random& random, int most_width, bool distinct) {
  const auto pick = [&](std::initializer_list<double> choices) { return choices.begin()[below(random, static_cast<int64_t>(choices.size()))]; };
  std::normal_distribution<double> normal;
#if defined(SAPO_FEW_SHAPES)
  const Type type = Type::bfloat16;
#else
  const auto type = static_cast<Type>(below(random, 3));
#endif
  const int width = static_cast<int>(chance(random, 0.3) ? 3 + below(random, 30) : 3 + below(random, most_width - 3));
  const int64_t height = 1 + below(random, 5);
  Buffer logits(type, height, width, random), out(type, height, width, random);
  if (chance(random, 0.5)) out = logits;  // the same layout in other memory
  Case c{.type = type, .count = 0, .height = height, .width = width, .in_place = chance(random, 0.4), .by_rows = chance(random, 0.6), .distinct = distinct,
         .logits = logits, .out = out, .rows = {}, .actions = {}, .plus = 0, .minus = 0, .temperature = static_cast<float>(pick({1.0, 1.0, 0.7, 2.0})),
         .old = {}, .advantages = {}, .weights = {}, .ref = {}, .loss = {}, .scale = pick({1.0, 0.01, -3.0}), .a = {}, .b = {}, .same = {}, .first = {}};

  // w+ and w-: first, last, side by side, anywhere.
  c.plus = static_cast<int>(chance(random, 0.3) ? 0 : chance(random, 0.4) ? width - 1 : below(random, width));
  do {
    c.minus = static_cast<int>(chance(random, 0.3) ? width - 1 : chance(random, 0.4) ? (c.plus + 1) % width : below(random, width));
  } while (c.minus == c.plus);
  for (int64_t row = 0; row < height; ++row) {
    const double spread = pick({1.0, 3.0, 0.0, 20.0}), shift = pick({0.0, 0.0, 300.0, -300.0}), minus_infinity = pick({0.0, 0.0, 0.5, 0.97});
    for (int j = 0; j < width; ++j) {
      const double x = shift + spread * normal(random);
      c.logits.set(row, j, chance(random, minus_infinity) ? -sapo::kInfinity<float> : static_cast<float>(x));
    }
    int sure = static_cast<int>(below(random, width));  // some allowed logit is finite
    while (sure == c.plus || sure == c.minus) sure = (sure + 1) % width;
    c.logits.set(row, sure, static_cast<float>(shift + spread * normal(random) + pick({0.0, 30.0})));
    if (chance(random, 0.5)) c.logits.set(row, c.plus, sapo::kNaN<float>);  // never to be looked at
    c.logits.set(row, c.minus, static_cast<float>(shift + 60.0));
  }

  c.count = c.by_rows ? 1 + below(random, distinct ? height : 8) : height;
  std::vector<int64_t> order;
  for (int64_t row = 0; row < height; ++row) order.push_back(row);
  std::shuffle(order.begin(), order.end(), random);
  for (int64_t i = 0; i < c.count; ++i) {
    c.rows.push_back(distinct ? order[static_cast<size_t>(i)] : below(random, height));
    int64_t action = 0;
    do {
      action = below(random, width);
      if (!distinct && i > 0 && chance(random, 0.4)) action = c.actions[static_cast<size_t>(below(random, i))];
    } while (action == c.plus || action == c.minus);
    c.actions.push_back(action);
  }
  const auto fill = [&](std::vector<float>& v, double chance_of, double mean, double spread) {
    if (!chance(random, chance_of)) return;
    for (int64_t i = 0; i < c.count; ++i) v.push_back(static_cast<float>(mean + spread * normal(random)));
  };
  fill(c.advantages, 1.0, 0.0, 1.0);
  if (chance(random, 0.1)) std::fill(c.advantages.begin(), c.advantages.end(), 0.0f);
  fill(c.old, 0.7, -4.0, 4.0);
  fill(c.weights, 0.5, 1.0, 0.3);
  fill(c.ref, 0.5, -4.0, 8.0);
  c.loss.low = chance(random, 0.2) ? 0.0f : 0.8f;
  c.loss.high = chance(random, 0.2) ? sapo::kInfinity<float> : 1.28f;
  c.loss.dual = chance(random, 0.4) ? sapo::kInfinity<float> : 3.0f;
  c.loss.kl_coef = 0.1f;
  c.loss.entropy_coef = pick({0.0, 0.01, -0.5});

  fill(c.a, 1.0, 0.0, 1.0);
  if (chance(random, 0.1)) std::fill(c.a.begin(), c.a.end(), 0.0f);
  fill(c.b, 0.5, 0.0, 0.3);
  return c;
}

// Sums over the tokens of a row, as sapo_fast/row_pass.py makes them before `grad`.
inline void merge_repeats(Case& c) {
  const std::vector<float> a = c.a, b = c.b;
  c.same.assign(a.size(), 0.0f);
  c.first.assign(a.size(), 0);
  for (size_t i = 0; i < a.size(); ++i) {
    c.a[i] = 0.0f;
    if (!b.empty()) c.b[i] = 0.0f;
    c.first[i] = static_cast<int64_t>(i);
    for (size_t k = 0; k < a.size(); ++k) {
      if (c.row(static_cast<int64_t>(k)) != c.row(static_cast<int64_t>(i))) continue;
      c.a[i] += a[k];
      if (!b.empty()) c.b[i] += b[k];
      if (c.actions[k] == c.actions[i]) c.same[i] += a[k];
      c.first[i] = std::min(c.first[i], static_cast<int64_t>(k));
    }
  }
}

struct Right {
  Real top, rest, log_sum, spread;
  std::vector<Real> logq;

  Right(Case& c, int64_t row) {
    std::vector<Real> x;
    for (int j = 0; j < c.width; ++j) {
      x.push_back(j == c.plus || j == c.minus ? -kInfinity : static_cast<Real>(c.logits.get(row, j)) / c.temperature);
    }
    const auto most = std::max_element(x.begin(), x.end());
    top = *most;
    rest = spread = 0.0L;
    for (auto i = x.begin(); i != x.end(); ++i) {
      if (i != most) rest += std::exp(*i - top);
      if (*i > -kInfinity) spread -= (*i - top) * std::exp(*i - top);
    }
    log_sum = std::log1p(rest);
    spread /= 1.0L + rest;
    for (Real y : x) logq.push_back(y - top - log_sum);
  }

  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
};

[[noreturn]] inline void complain(const std::string& name, const Case& c, const char* what, int64_t i, int64_t column, Real want, Real have) {
  std::printf("%s: %s[%lld, %lld] is %.9Lg, must be %.9Lg (type %d, V %d, T %lld, n %lld, w %d %d, temperature %g, in place %d, by rows %d)\n", name.c_str(),
              what, static_cast<long long>(i), static_cast<long long>(column), have, want, static_cast<int>(c.type), c.width,
              static_cast<long long>(c.height), static_cast<long long>(c.count), c.plus, c.minus, c.temperature, c.in_place, c.by_rows);
  std::exit(1);
}

inline void check_stats(Case& c, const Result& got, const std::string& name) {
  for (int64_t i = 0; i < c.count; ++i) {
    const auto at = static_cast<size_t>(i);
    const Right right(c, c.row(i));
    const auto compare = [&](const char* what, Real want, float have, Real allowed) {
      if (want == -Right::kInfinity ? have != -sapo::kInfinity<float> : !(std::fabs(want - have) <= allowed)) complain(name, c, what, i, -1, want, have);
    };
    // Of the exponentials: 1e-5 of what is not the largest. A few roundings of the results.
    const Real share = 1e-5L * right.rest / (1.0L + right.rest) + 1e-37L, rounding = 3e-7L;
    const Real logp = right.logq[static_cast<size_t>(c.actions[at])];
    compare("top", right.top, got.top[at], rounding * std::fabs(right.top));
    compare("log_sum", right.log_sum, got.log_sum[at], share + rounding * right.log_sum);
    compare("spread", right.spread, got.spread[at], 8.0L * share + rounding * right.spread + 1e-5L * right.spread);
    compare("logprob", logp, got.logprob[at], share + rounding * std::fabs(logp) + rounding * right.log_sum);
  }
}

struct Slope {
  Real a, b;
  bool clear;  // far from any edge where the gradient jumps
};

// From the log-prob as found, so that only the gradient is judged.
inline Slope slope_of(const Case& c, int64_t i, Real logprob) {
  const auto at = static_cast<size_t>(i);
  const Real advantage = c.advantages[at], raw = c.old.empty() ? 0.0L : logprob - c.old[at];
  const Real ratio = std::exp(std::clamp(raw, -20.0L, 20.0L)), plain = ratio * advantage;
  const Real limited = std::clamp<Real>(ratio, c.loss.low, c.loss.high) * advantage;
  Real objective = std::min(plain, limited);
  bool flat = limited < plain || std::fabs(raw) > 20.0L;
  if (advantage < 0.0L && c.loss.dual * advantage > objective) flat = true;
  const auto near = [](Real x, Real y) { return std::fabs(x - y) <= 1e-4L * (1.0L + std::fabs(y)); };
  bool clear = !near(ratio, c.loss.low) && !near(ratio, c.loss.high) && !near(ratio, c.loss.dual) && !near(std::fabs(raw), 20.0L);
  Real a = flat ? 0.0L : -plain;
  if (!c.weights.empty()) a *= c.weights[at];
  if (!c.ref.empty()) {
    const Real d = c.ref[at] - logprob;
    clear = clear && !near(std::fabs(d), 20.0L);
    if (std::fabs(d) <= 20.0L) a -= static_cast<Real>(c.loss.kl_coef) * std::expm1(d);
  }
  return {a * c.scale, c.loss.entropy_coef * c.scale, clear};
}

// The gradient of the rows of `c`, entry by entry; nothing else may have been written. `from_loss`: slopes of the loss, else those of the tokens before
// `merge_repeats` (`a`, `b`).
inline void check_grad(Case& c, Result& got, bool from_loss, const std::vector<float>& a, const std::vector<float>& b, const std::string& name) {
  Buffer& out = c.in_place ? got.logits : got.out;
  Buffer want_untouched = c.in_place ? c.logits : c.out;
  for (int64_t row = 0; row < c.height; ++row) {
    std::vector<Real> g(static_cast<size_t>(c.width), 0.0L), allowed(g);
    bool touched = false, clear = true;
    const Right right(c, row);
    const Real entropy = right.log_sum + right.spread;
    for (int64_t i = 0; i < c.count; ++i) {
      if (c.row(i) != row) continue;
      touched = true;
      const auto at = static_cast<size_t>(i);
      const Slope s = from_loss ? slope_of(c, i, got.logprob[at]) : Slope{a[at], b.empty() ? 0.0L : b[at], true};
      clear = clear && s.clear;
      for (int j = 0; j < c.width; ++j) {
        if (j == c.plus || j == c.minus) continue;
        const auto k = static_cast<size_t>(j);
        const Real logq = right.logq[k], q = std::exp(logq);
        const bool taken = j == c.actions[at];
        const Real size = taken ? -std::expm1(logq) : q;
        g[k] += (s.a * (taken ? size : -q) + (q > 0.0L ? s.b * q * (logq + entropy) : 0.0L)) / c.temperature;
        const Real exponent = q > 0.0L ? 3e-7L * (std::fabs(logq) + std::fabs(right.top) + right.log_sum) : 0.0L;
        const Real of_entropy = q > 0.0L ? std::fabs(s.b) * q * (std::fabs(logq) + entropy + 1.0L) : 0.0L;
        allowed[k] += (std::fabs(s.a) * size + of_entropy) / c.temperature * (2e-5L + exponent) +
                      (std::fabs(s.a) + 100.0L * std::fabs(s.b)) * 1e-35L;
      }
    }
    for (int j = 0; j < c.width && touched; ++j) {
      const auto k = static_cast<size_t>(j);
      const float have = out.get(row, j);
      const Real unit = c.type == Type::float32 ? 0x1p-24L : c.type == Type::bfloat16 ? 0x1p-8L : 0x1p-11L;
      const Real smallest = c.type == Type::float16 ? 0x1p-24L : 1e-37L;
      if (j == c.plus || j == c.minus) {
        if (std::bit_cast<uint32_t>(have) != 0) complain(name, c, "gradient of a value token", row, j, 0.0L, have);
      } else if (c.type == Type::float16 && std::fabs(g[k]) > 65500.0L) {
        if (!(std::fabs(have) >= 65000.0f)) complain(name, c, "gradient beyond float16", row, j, g[k], have);
      } else if (clear && !(std::fabs(g[k] - have) <= allowed[k] + unit * std::fabs(g[k]) + smallest)) {
        complain(name, c, "gradient", row, j, g[k], have);
      }
      std::memcpy(want_untouched.at(row, j), out.at(row, j), static_cast<size_t>(size_of(c.type)));
    }
  }
  if (want_untouched.memory != out.memory) complain(name, c, "memory beside the rows", 0, 0, 0.0L, 1.0L);
}

}  // namespace cases
