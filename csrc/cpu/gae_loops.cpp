// The loops of gae.h. Compiled several times with different instruction sets (see CMakeLists.txt), each in its own SAPO_ISA namespace.
//
// Turns are taken four at a time: within a vector the recurrence is a two-step scan with constant weights, and only the carry from one vector
// to the next is serial (one multiply-add per four turns). Trajectories shorter than a vector, and the last few turns of the others, go one by one.
#include "gae.h"

#include <cstring>

#ifndef SAPO_ISA
#error "define SAPO_ISA: the namespace of this instruction set"
#endif

namespace sapo::cpu::SAPO_ISA {
namespace {

constexpr int kLanes = 4;
using Doubles = double __attribute__((vector_size(8 * kLanes)));
using Floats = float __attribute__((vector_size(4 * kLanes)));

#if defined(__clang__)
#define SAPO_SHIFT(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
using Places = int64_t __attribute__((vector_size(8 * kLanes)));
#define SAPO_SHIFT(x, y, ...) __builtin_shuffle(x, y, Places{__VA_ARGS__})
#endif

inline Doubles load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return __builtin_convertvector(x, Doubles);
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }
inline void store(float* to, Doubles x) { store(to, __builtin_convertvector(x, Floats)); }

inline Doubles splat(double x) { return Doubles{x, x, x, x}; }

// One lambda's recurrence: the future carried in, and its constants in the forms the vector step needs.
struct Carry {
  double future;
  double carried, valued, carried4;
  Doubles weights;  // of the future carried in, in the future before each lane

  Carry(Decay decay, double start) : future(start), carried(decay.carried), valued(decay.valued) {
    const double squared = carried * carried;
    carried4 = squared * squared;
    weights = Doubles{carried4, squared * carried, squared, carried};
  }

  double step(double reward, double value) {
    const double target = lambda_return(reward, future);
    future = future_before(target, value, carried, valued);
    return target;
  }

  // Lane 3 is the latest turn. Returns the lambda-returns of the four.
  Doubles step(Doubles rewards, Doubles values) {
    const Doubles zero = splat(0.0);
    Doubles x = offset_of(rewards, values, splat(carried), splat(valued));
    x += splat(carried) * SAPO_SHIFT(x, zero, 1, 2, 3, 4);
    x += splat(carried * carried) * SAPO_SHIFT(x, zero, 2, 3, 4, 5);
    const Doubles futures = x + weights * splat(future);  // before each lane
    const Doubles after = SAPO_SHIFT(futures, splat(future), 1, 2, 3, 4);
    future = x[0] + carried4 * future;
    return lambda_return(rewards, after);
  }
};

// Sums over a unit, scalar and vector side by side, around one shift.
struct UnitSums {
  Sums scalar;
  Doubles sum = splat(0.0), squares = splat(0.0), size = splat(0.0);

  void add(double x) { scalar.add(x); }

  void add(Doubles x) {
    if (scalar.count == 0.0) scalar.shift = x[kLanes - 1];
    const Doubles d = x - splat(scalar.shift), flipped = -x;
    scalar.count += kLanes;
    sum += d;
    squares += d * d;
    size = x > size ? x : size;
    size = flipped > size ? flipped : size;
  }

  Moments finish() {
    scalar.sum += (sum[0] + sum[1]) + (sum[2] + sum[3]);
    scalar.squares += (squares[0] + squares[1]) + (squares[2] + squares[3]);
    for (int lane = 0; lane < kLanes; ++lane) scalar.size = larger(scalar.size, size[lane]);
    return scalar.finish();
  }
};

// Moments are those of the advantages as returned, rounded to float32.
template <bool kFlags>
inline void count(const Problem& p, int64_t t, float advantage, UnitSums& sums) {
  double x = advantage;
  if constexpr (kFlags) {
    if (p.valid && !p.valid[t]) return;
    if (p.invalid && p.invalid[t]) x -= p.invalid_penalty;
  }
  sums.add(x);
}

template <bool kTwo, bool kQ, bool kFlags>
void trajectory(const Problem& p, int64_t begin, int64_t end, double bootstrap, UnitSums& sums) {
  Carry policy(p.policy, p.gamma * bootstrap);
  Carry value(p.value, p.gamma * bootstrap);
  double q_next = bootstrap;
  int64_t t = end;
  for (int64_t rest = (end - begin) % kLanes; rest > 0; --rest) {
    --t;
    const double r = p.rewards[t], v = p.values[t];
    const double target = policy.step(r, v);
    const float advantage = static_cast<float>(target - v);
    p.advantages[t] = advantage;
    p.v_targets[t] = static_cast<float>(kTwo ? value.step(r, v) : target);
    if constexpr (kQ) {
      p.q_targets[t] = static_cast<float>(sarsa_target(r, q_next, p.gamma));
      q_next = p.q_values[t];
    }
    count<kFlags>(p, t, advantage, sums);
  }
  Doubles q_later = splat(q_next);
  while (t > begin) {
    t -= kLanes;
    const Doubles r = load(p.rewards + t), v = load(p.values + t);
    const Doubles target = policy.step(r, v);
    const Floats advantage = __builtin_convertvector(target - v, Floats);
    store(p.advantages + t, advantage);
    if constexpr (kTwo) {
      store(p.v_targets + t, value.step(r, v));
    } else {
      store(p.v_targets + t, target);
    }
    if constexpr (kQ) {
      const Doubles q = load(p.q_values + t);
      store(p.q_targets + t, sarsa_target(r, SAPO_SHIFT(q, q_later, 1, 2, 3, 4), splat(p.gamma)));
      q_later = q;
    }
    if constexpr (kFlags) {
      for (int lane = kLanes - 1; lane >= 0; --lane) count<true>(p, t + lane, advantage[lane], sums);
    } else {
      sums.add(__builtin_convertvector(advantage, Doubles));
    }
  }
}

template <bool kTwo, bool kQ, bool kFlags>
Moments turns(const Problem& p, const Offsets& offsets, int64_t first, int64_t last) {
  UnitSums sums;
  int64_t begin = first < last ? offsets[first] : 0;
  for (int64_t b = first; b < last; ++b) {
    const int64_t end = offsets[b + 1];
    if (begin < end) trajectory<kTwo, kQ, kFlags>(p, begin, end, p.bootstrap_of(b), sums);
    begin = end;
  }
  return sums.finish();
}

Moments any_turns(const Problem& p, const Offsets& offsets, int64_t first, int64_t last) {
  static constexpr Loop table[8] = {turns<false, false, false>, turns<false, false, true>, turns<false, true, false>, turns<false, true, true>,
                                    turns<true, false, false>,  turns<true, false, true>,  turns<true, true, false>,  turns<true, true, true>};
  return table[4 * p.two + 2 * (p.q_values != nullptr) + (p.invalid || p.valid)](p, offsets, first, last);
}

// Token by token: which of the two maps applies depends on the data.
template <bool kTwo>
Moments tokens(const Problem& p, const Offsets& offsets, int64_t first, int64_t last) {
  Sums sums;
  for (int64_t b = first; b < last; ++b) {
    Carry policy(p.policy, p.gamma * p.bootstrap_of(b));
    Carry value(p.value, policy.future);
    const int64_t begin = offsets[b];
    for (int64_t t = offsets[b + 1] - 1; t >= begin; --t) {
      const double r = p.rewards[t];
      float advantage = 0.0f;
      double v_target = 0.0;
      if (p.actions[t]) {
        const double v = p.values[t];
        v_target = policy.step(r, v);
        advantage = static_cast<float>(v_target - v);
        if constexpr (kTwo) v_target = value.step(r, v);
        sums.add(advantage);
      } else {
        policy.future += r;
        if constexpr (kTwo) value.future += r;
      }
      p.advantages[t] = advantage;
      p.v_targets[t] = static_cast<float>(v_target);
    }
  }
  return sums.finish();
}

Moments any_tokens(const Problem& p, const Offsets& offsets, int64_t first, int64_t last) {
  return p.two ? tokens<true>(p, offsets, first, last) : tokens<false>(p, offsets, first, last);
}

}  // namespace

extern const Loops loops = {any_turns, any_tokens};

}  // namespace sapo::cpu::SAPO_ISA
