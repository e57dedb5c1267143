// The loops of gae.h. Compiled several times with different instruction sets (see CMakeLists.txt), each in its own SAPO_ISA namespace.
//
// With vectors, turns are taken four at a time: the futures inside a vector are sums of shifted copies with constant weights, and only the carry from
// one vector to the next is serial (one multiply-add per four turns). The last few turns of a trajectory go one by one. What does not depend on
// the carry (Q targets, moments) has loops of its own over data still in the first-level cache: short dependency chains keep the processor busy.
#ifndef SAPO_ISA
#error "define SAPO_ISA: the namespace of this instruction set"
#endif

#include "gae.h"
#include "vector.h"

#include <algorithm>
#include <bit>

namespace sapo::cpu::SAPO_ISA {
namespace {

// One lambda's recurrence.
struct Carry {
  double future;
  double carried, valued;

  Carry(Decay decay, double start) : future(start), carried(decay.carried), valued(decay.valued) {}

  double step(double reward, double value) {
    const double target = lambda_return(reward, future);
    future = future_before(target, value, carried, valued);
    return target;
  }

#if defined(SAPO_VECTORS)
  // Lane 3 is the latest turn. Returns the lambda-returns of the four.
  SAPO_INLINE Doubles step(Doubles rewards, Doubles values) {
    const double squared = carried * carried;
    const Doubles offsets = offset_of(rewards, values, splat(carried), splat(valued));
    const Doubles two = shift_two(offsets);
    const Doubles inside = _mm256_shuffle_pd(offsets, two, 0b0101) + splat(carried) * two + splat(squared) * shift_one(two);
    const Doubles weights = {squared * carried, squared, carried, 1.0};
    const Doubles after = inside + weights * splat(future);
    future = (offsets[0] + carried * inside[0]) + squared * squared * future;
    return lambda_return(rewards, after);
  }
#endif
};

// Turns [begin, end) of one trajectory, from the end.
template <bool kTwo>
inline void walk(const Problem& p, int64_t begin, int64_t end, Carry& policy, Carry& value) {
  int64_t t = end;
#if defined(SAPO_VECTORS)
  const int64_t vectors = begin + (end - begin) / kLanes * kLanes;
#else
  const int64_t vectors = begin;
#endif
  while (t > vectors) {
    --t;
    const double r = p.rewards[t], v = p.values[t];
    const double target = policy.step(r, v);
    p.advantages[t] = static_cast<float>(target - v);
    p.v_targets[t] = static_cast<float>(kTwo ? value.step(r, v) : target);
  }
#if defined(SAPO_VECTORS)
  while (t > begin) {
    t -= kLanes;
    const Doubles r = load(p.rewards + t), v = load(p.values + t);
    const Doubles target = policy.step(r, v);
    store(p.advantages + t, target - v);
    if constexpr (kTwo) {
      store(p.v_targets + t, value.step(r, v));
    } else {
      store(p.v_targets + t, target);
    }
  }
#endif
}

// x where the flag is set, else 0. By bits: no branch to mispredict, and a NaN that does not count leaves no trace.
SAPO_INLINE float keep_if(bool flag, float x) { return std::bit_cast<float>(std::bit_cast<uint32_t>(x) & -static_cast<uint32_t>(flag)); }

// Tokens [begin, end) of one trajectory, one by one from the end: which of two maps applies depends on the data. Not inlined: next to a call, gcc
// keeps the carried future in memory.
template <bool kTwo>
__attribute__((noinline)) void walk_tokens(const Problem& problem, int64_t begin, int64_t end, Carry& policy_carry, Carry& value_carry) {
  const Problem p = problem;
  const double policy_carried[2] = {1.0, p.policy.carried}, value_carried[2] = {1.0, p.value.carried};
  double policy = policy_carry.future, value = value_carry.future;
  for (int64_t t = end - 1; t >= begin; --t) {
    const bool action = p.actions[t] != 0;
    const double r = p.rewards[t], v = keep_if(action, p.values[t]);
    const double target = lambda_return(r, policy);
    p.advantages[t] = keep_if(action, static_cast<float>(target - v));
    p.v_targets[t] = keep_if(action, static_cast<float>(kTwo ? lambda_return(r, value) : target));
    policy = policy_carried[action] * policy + offset_of(r, v, policy_carried[action], p.policy.valued);
    if constexpr (kTwo) value = value_carried[action] * value + offset_of(r, v, value_carried[action], p.value.valued);
  }
  policy_carry.future = policy;
  value_carry.future = value;
}

// Q targets of [begin, end), from the end; `q_next` follows the last.
inline void sarsa_targets(const Problem& p, int64_t begin, int64_t end, double q_next) {
  int64_t t = end - 1;
  p.q_targets[t] = static_cast<float>(sarsa_target<double>(p.rewards[t], q_next, p.gamma));
#if defined(SAPO_VECTORS)
  for (; t - kLanes >= begin; t -= kLanes) {
    store(p.q_targets + t - kLanes, sarsa_target(load(p.rewards + t - kLanes), load(p.q_values + t - kLanes + 1), splat(p.gamma)));
  }
#endif
  for (--t; t >= begin; --t) p.q_targets[t] = static_cast<float>(sarsa_target<double>(p.rewards[t], p.q_values[t + 1], p.gamma));
}

// Which advantages count, and what is taken off them.
struct Counted {
  const uint8_t* keep;     // null: all
  const uint8_t* invalid;  // null: none
  double penalty;

  bool operator()(int64_t t) const { return !keep || keep[t]; }
};

// Adds the advantages of [begin, end), as returned (rounded to float32), to the sums.
template <bool kFlags>
void add_to(Sums& sums, const float* advantages, Counted counted, int64_t begin, int64_t end) {
  int64_t t = begin;
  const auto add_one = [&] {
    if (!kFlags || counted(t)) sums.add(kFlags && counted.invalid && counted.invalid[t] ? advantages[t] - counted.penalty : advantages[t]);
  };
#if defined(SAPO_VECTORS)
  for (; t < end && sums.count == 0.0; ++t) add_one();  // the first fixes the shift
  constexpr int kChains = 4;                            // additions in flight: one chain would wait for itself
  const Doubles shift = splat(sums.shift), penalty = splat(counted.penalty);
  Doubles sum[kChains] = {}, squares[kChains] = {}, size[kChains] = {};
  int64_t kept = 0;
  for (; t + kChains * kLanes <= end; t += kChains * kLanes) {
    for (int i = 0; i < kChains; ++i) {
      const int64_t at = t + i * kLanes;
      Doubles x = load(advantages + at);
      if (kFlags && counted.invalid) x -= where(flags(counted.invalid + at), penalty);
      Doubles d = x - shift;
      if (kFlags && counted.keep) {
        const Doubles keep = flags(counted.keep + at);
        x = where(keep, x);
        d = where(keep, d);
        kept += count(keep);
      } else {
        kept += kLanes;
      }
      sum[i] += d;
      squares[i] += d * d;
      size[i] = larger(size[i], magnitude(x));
    }
  }
  sums.count += static_cast<double>(kept);
  for (int i = 0; i < kChains; ++i) {
    for (int lane = 0; lane < kLanes; ++lane) {
      sums.sum += sum[i][lane];
      sums.squares += squares[i][lane];
      sums.size = sapo::larger(sums.size, size[i][lane]);
    }
  }
#endif
  for (; t < end; ++t) add_one();
}

// No NaN and no infinity among them.
bool finite(const float* x, int64_t begin, int64_t end) {
  constexpr uint32_t kExponent = 0x7f800000;  // all ones in both
  uint32_t found = 0;
  for (int64_t i = begin; i < end; ++i) found |= (std::bit_cast<uint32_t>(x[i]) & kExponent) == kExponent;
  return !found;
}

// Turns whose results still sit in the first-level cache when their moments are summed.
constexpr int64_t kPiece = 1024;

template <bool kTokens, bool kTwo, bool kQ, bool kFlags>
Part loop(const Problem& problem, int64_t first, int64_t last) {
  const Problem p = problem;  // a copy no store can alias, so that it stays in registers
  const Counted counted{kTokens ? p.actions : p.valid, p.invalid, p.invalid_penalty};
  Sums sums;
  Part part;
  // A number that is not finite shows in the advantage of its own turn, or in the rewards of a token before the first action (below). Q values have no part
  // in advantages.
  const auto settle = [&](int64_t begin, int64_t end) {
    if (p.moments) add_to<kFlags>(sums, p.advantages, counted, begin, end);
    if (p.check) part.sound = part.sound && finite(p.advantages, begin, end) && (!kQ || finite(p.q_values, begin, end));
  };
  int64_t settled = first < last ? p.offsets[first] : 0;  // everything before it is in the sums
  int64_t begin = settled;
  for (int64_t b = first; b < last; ++b) {
    const int64_t end = p.offsets[b + 1];
    double q_next = p.bootstrap ? p.bootstrap[b] : 0.0;
    if (p.check && !std::isfinite(q_next)) part.sound = false;
    if (begin == end) continue;
    Carry policy(p.policy, p.gamma * q_next), value(p.value, p.gamma * q_next);
    const bool long_one = end - begin > kPiece;
    if (long_one) {
      settle(settled, begin);
      settled = end;
    }
    for (int64_t high = end; high > begin;) {
      const int64_t low = std::max(begin, high - kPiece);
      if constexpr (kTokens) {
        walk_tokens<kTwo>(p, low, high, policy, value);
      } else {
        walk<kTwo>(p, low, high, policy, value);
      }
      if constexpr (kQ) {
        sarsa_targets(p, low, high, q_next);
        q_next = p.q_values[low];
      }
      if (long_one) settle(low, high);
      high = low;
    }
    if constexpr (kTokens) {
      for (int64_t t = begin; p.check && t < end && !p.actions[t]; ++t) part.sound = part.sound && p.rewards[t] == 0.0f;
    }
    if (end - settled >= kPiece) {
      settle(settled, end);
      settled = end;
    }
    begin = end;
  }
  settle(settled, begin);
  part.moments = sums.finish();
  return part;
}

Part turns(const Problem& p, int64_t first, int64_t last) {
  static constexpr Loop table[8] = {
      loop<false, false, false, false>, loop<false, false, false, true>, loop<false, false, true, false>, loop<false, false, true, true>,
      loop<false, true, false, false>,  loop<false, true, false, true>,  loop<false, true, true, false>,  loop<false, true, true, true>};
  return table[4 * p.two() + 2 * (p.q_values != nullptr) + (p.invalid || p.valid)](p, first, last);
}

Part tokens(const Problem& p, int64_t first, int64_t last) {
  return (p.two() ? loop<true, true, false, true> : loop<true, false, false, true>)(p, first, last);
}

}  // namespace

extern const Loops loops = {turns, tokens};

}  // namespace sapo::cpu::SAPO_ISA
