// Random GAE problems, the right answer in extended precision, and the comparison; for the CPU loops and for the CUDA kernels under the emulator.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/problem.h"

namespace cases {

using Random = std::mt19937_64;

inline int64_t below(Random& random, int64_t n) { return n <= 0 ? 0 : static_cast<int64_t>(random() % static_cast<uint64_t>(n)); }
inline bool chance(Random& random, double p) { return std::uniform_real_distribution<double>()(random) < p; }

struct Case {
  bool tokens = false;
  std::vector<int64_t> wide_offsets;
  std::vector<int32_t> narrow_offsets;
  std::vector<float> rewards, values, q_values, bootstrap;
  std::vector<uint8_t> actions, invalid, valid;
  double gamma = 1.0, lam = 1.0, lam_v = 1.0, invalid_penalty = 0.0;
  bool moments = true;

  int64_t total() const { return static_cast<int64_t>(rewards.size()); }
  int64_t trajectories() const { return static_cast<int64_t>(wide_offsets.size()) - 1; }
};

struct Result {
  std::vector<float> advantages, v_targets, q_targets;
  std::vector<double> moments;

  explicit Result(const Case& c)
      : advantages(c.rewards.size(), -7e33f), v_targets(advantages), q_targets(c.q_values.empty() ? 0 : c.rewards.size(), -7e33f), moments(4, -7e33) {}

  bool same_bits(const Result& other) const {
    const auto same = [](const auto& x, const auto& y) { return x.empty() || std::memcmp(x.data(), y.data(), sizeof x[0] * x.size()) == 0; };
    return same(advantages, other.advantages) && same(v_targets, other.v_targets) && same(q_targets, other.q_targets) && same(moments, other.moments);
  }
};

inline sapo::Problem problem_of(const Case& c, Result& out) {
  const auto or_null = [](const auto& v) { return v.empty() ? nullptr : v.data(); };
  sapo::Problem p{};
  p.total = c.total();
  p.trajectories = c.trajectories();
  p.offsets = c.narrow_offsets.empty() ? sapo::Offsets{c.wide_offsets.data(), true} : sapo::Offsets{c.narrow_offsets.data(), false};
  p.rewards = c.rewards.data();
  p.values = c.values.data();
  p.q_values = or_null(c.q_values);
  p.bootstrap = or_null(c.bootstrap);
  p.actions = c.tokens ? c.actions.data() : nullptr;
  p.invalid = or_null(c.invalid);
  p.valid = or_null(c.valid);
  p.advantages = out.advantages.data();
  p.v_targets = out.v_targets.data();
  p.q_targets = out.q_targets.data();
  p.moments = c.moments ? out.moments.data() : nullptr;
  p.gamma = c.gamma;
  p.policy = sapo::Decay::of(c.gamma, c.lam);
  p.value = sapo::Decay::of(c.gamma, c.lam_v);
  p.invalid_penalty = c.invalid_penalty;
  return p;
}

// `tile`: lengths around its multiples are the ones where an off-by-one would show.
inline Case random_case(Random& random, int64_t tile, int64_t most_turns) {
  Case c;
  c.tokens = chance(random, 0.4);
  c.moments = chance(random, 0.8);
  const auto pick = [&](std::initializer_list<double> choices) { return choices.begin()[below(random, static_cast<int64_t>(choices.size()))]; };
  c.gamma = pick({1.0, 0.95, 0.99, 0.5, 0.0});
  c.lam = pick({1.0, 0.95, 0.9, 0.0});
  c.lam_v = chance(random, 0.5) ? c.lam : pick({1.0, 0.95, 0.3});
  c.wide_offsets = {0};
  const int64_t most = below(random, 24);
  while (c.trajectories() < most) {
    int64_t length = 0;
    switch (below(random, 6)) {
      case 0: length = below(random, 3); break;
      case 1: length = below(random, 40); break;
      case 2: length = tile - 2 + below(random, 5); break;
      case 3: length = tile * (1 + below(random, 4)) - 2 + below(random, 5); break;
      case 4: length = below(random, 8 * tile); break;
      case 5: length = 1 + below(random, 4); break;
    }
    if (c.wide_offsets.back() + length > most_turns) break;
    c.wide_offsets.push_back(c.wide_offsets.back() + std::max<int64_t>(length, 0));
  }
  if (chance(random, 0.5)) c.narrow_offsets.assign(c.wide_offsets.begin(), c.wide_offsets.end());
  const size_t total = static_cast<size_t>(c.wide_offsets.back());
  const float scale = static_cast<float>(pick({1.0, 1e-3, 1e4})), offset = static_cast<float>(pick({0.0, 5.0}));
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<float>& v, size_t n) {
    v.resize(n);
    for (float& x : v) x = scale * (normal(random) + offset);
  };
  const auto fill_flags = [&](std::vector<uint8_t>& v, double p) {
    v.resize(total);
    for (uint8_t& x : v) x = chance(random, p);
  };
  fill(c.rewards, total);
  fill(c.values, total);
  if (chance(random, 0.6)) fill(c.bootstrap, static_cast<size_t>(c.trajectories()));
  if (c.tokens) {
    // Runs, as observations and responses make them, and noise.
    const double run = pick({0.0, 0.9, 0.98});
    bool action = chance(random, 0.5);
    c.actions.resize(total);
    for (size_t t = 0; t < total; ++t) {
      if (!chance(random, run)) action = chance(random, 0.6);
      c.actions[t] = action;
      if (!action) c.values[t] = std::numeric_limits<float>::quiet_NaN();  // never to be looked at
    }
  } else {
    if (chance(random, 0.7)) fill(c.q_values, total);
    if (chance(random, 0.4)) fill_flags(c.invalid, 0.2), c.invalid_penalty = 0.1 * scale;
    if (chance(random, 0.4)) fill_flags(c.valid, 0.7);
  }
  return c;
}

// The definition, turn by turn, with delta and A as the method writes them; long double.
inline void check(const Case& c, const Result& got, const std::string& name) {
  using Real = long double;
  const auto complain = [&](const char* what, int64_t t, Real want, Real have) {
    std::printf("%s: %s[%lld]: %.17Lg, must be %.17Lg (tokens %d, T %lld, B %lld, gamma %g, lam %g, lam_v %g)\n", name.c_str(), what,
                static_cast<long long>(t), have, want, c.tokens, static_cast<long long>(c.total()), static_cast<long long>(c.trajectories()), c.gamma,
                c.lam, c.lam_v);
    std::exit(1);
  };
  std::vector<Real> counted;
  Real largest = 0.0L;
  for (int64_t b = 0; b < c.trajectories(); ++b) {
    const Real boot = c.bootstrap.empty() ? 0.0L : c.bootstrap[static_cast<size_t>(b)];
    Real next_value = boot, advantage = 0.0L, advantage_v = 0.0L, q_next = boot, pending = 0.0L, scale = std::fabs(boot);
    for (int64_t i = c.wide_offsets[static_cast<size_t>(b) + 1] - 1; i >= c.wide_offsets[static_cast<size_t>(b)]; --i) {
      const auto t = static_cast<size_t>(i);
      // One rounding to float32, and float64 arithmetic on numbers as large as `scale`.
      const auto compare = [&](const char* what, Real want, float have) {
        const Real allowed = 0.5001L * std::fabs(want) * 0x1p-23L + 1e-13L * scale + 1e-44L;
        if (!(std::fabs(want - have) <= allowed)) complain(what, i, want, have);
      };
      if (c.tokens && !c.actions[t]) {
        pending += c.rewards[t];
        scale += std::fabs(static_cast<Real>(c.rewards[t]));
        if (got.advantages[t] != 0.0f || got.v_targets[t] != 0.0f) complain("masked", i, 0.0L, got.advantages[t]);
        continue;
      }
      const Real r = c.rewards[t] + pending, v = c.values[t];
      pending = 0.0L;
      scale += std::fabs(r) + std::fabs(v);
      const Real delta = r + c.gamma * next_value - v;
      advantage = delta + static_cast<Real>(c.gamma) * c.lam * advantage;
      advantage_v = delta + static_cast<Real>(c.gamma) * c.lam_v * advantage_v;
      compare("advantages", advantage, got.advantages[t]);
      compare("v_targets", v + advantage_v, got.v_targets[t]);
      if (!c.q_values.empty()) {
        compare("q_targets", r + static_cast<Real>(c.gamma) * q_next, got.q_targets[t]);
        q_next = c.q_values[t];
      }
      next_value = v;
      if (c.valid.empty() || c.valid[t]) {
        counted.push_back(static_cast<Real>(got.advantages[t]) - (!c.invalid.empty() && c.invalid[t] ? c.invalid_penalty : 0.0L));
        largest = std::max(largest, std::fabs(counted.back()));
      }
    }
  }
  if (!c.moments) {
    if (got.moments[0] != -7e33) complain("moments nobody wanted", 0, -7e33L, got.moments[0]);
    return;
  }
  Real mean = 0.0L, m2 = 0.0L;
  for (Real x : counted) mean += x;
  if (!counted.empty()) mean /= static_cast<Real>(counted.size());
  for (Real x : counted) m2 += (x - mean) * (x - mean);
  const Real n = static_cast<Real>(counted.size()), floor = 1e-300L;
  if (got.moments[0] != static_cast<double>(n)) complain("count", 0, n, got.moments[0]);
  if (!(std::fabs(got.moments[1] - mean) <= 1e-12L * largest + floor)) complain("mean", 0, mean, got.moments[1]);
  if (!(std::fabs(got.moments[2] - m2) <= 1e-10L * m2 + 1e-20L * n * n * largest * largest + floor)) complain("m2", 0, m2, got.moments[2]);
  if (std::fabs(got.moments[3] - largest) > 1e-12L * largest) complain("size", 0, largest, got.moments[3]);
}

// One number of one trajectory becomes NaN: no other trajectory may change by a bit.
inline int64_t poison(Case& c, Random& random) {
  for (int attempt = 0; attempt < 20 && c.total() > 0; ++attempt) {
    const int64_t t = below(random, c.total());
    if (c.tokens && !c.actions[static_cast<size_t>(t)]) continue;
    (chance(random, 0.5) ? c.values : c.rewards)[static_cast<size_t>(t)] = std::numeric_limits<float>::quiet_NaN();
    return std::upper_bound(c.wide_offsets.begin(), c.wide_offsets.end(), t) - c.wide_offsets.begin() - 1;
  }
  return -1;
}

inline void check_confined(const Case& c, int64_t poisoned, const Result& clean, const Result& got, const std::string& name) {
  const int64_t begin = c.wide_offsets[static_cast<size_t>(poisoned)], end = c.wide_offsets[static_cast<size_t>(poisoned) + 1];
  const auto differ = [](float x, float y) { return std::memcmp(&x, &y, 4) != 0; };
  for (int64_t i = 0; i < c.total(); ++i) {
    const auto t = static_cast<size_t>(i);
    if (begin <= i && i < end) continue;
    if (differ(clean.advantages[t], got.advantages[t]) || differ(clean.v_targets[t], got.v_targets[t]) ||
        (!got.q_targets.empty() && differ(clean.q_targets[t], got.q_targets[t]))) {
      std::printf("%s: a NaN in trajectory %lld reached turn %lld\n", name.c_str(), static_cast<long long>(poisoned), static_cast<long long>(i));
      std::exit(1);
    }
  }
  bool seen = false;
  for (int64_t i = begin; i < end; ++i) seen = seen || std::isnan(got.advantages[static_cast<size_t>(i)]);
  if (!seen) {
    std::printf("%s: a NaN in trajectory %lld left no trace in it\n", name.c_str(), static_cast<long long>(poisoned));
    std::exit(1);
  }
}

}  // namespace cases
