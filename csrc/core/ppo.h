// What the policy's losses ask of a token: A = dL/dlogp of PPO with asymmetric and dual clip, token weights and k3; the arithmetic of
// sapo_fast/loss_terms.py, token_terms. Losses and metrics themselves are made there, from the statistics.
#pragma once

#include "portable.h"

namespace sapo {

template <class Real>
struct PolicyLoss {
  Real low, high;     // of the ratio; 0 and infinity where a clip is off
  Real dual;          // infinity: off
  Real kl_coef;
  double entropy_coef;
};

// [n] each; null where there is none.
template <class Real>
struct TokenInputs {
  const Real* old;  // null: this pass's own log-probs, ratio exactly 1
  const Real* advantages;
  const Real* weights;
  const Real* ref;
};

inline constexpr int kLogRatioLimit = 20;

// A NaN passes.
template <class Real>
SAPO_HD Real clamped(Real x, Real low, Real high) {
  return x < low ? low : x > high ? high : x;
}

// Ties take the unclipped branch; a clip passes gradient at its bounds.
template <class Real>
SAPO_HD Real policy_slope(const PolicyLoss<Real>& loss, const TokenInputs<Real>& tokens, int64_t i, Real logprob) {
  const Real limit = Real(kLogRatioLimit);
  const Real advantage = tokens.advantages[i];
  const Real raw = tokens.old ? logprob - tokens.old[i] : Real(0);
  const Real ratio = exp(clamped(raw, -limit, limit));
  const Real plain = ratio * advantage, limited = clamped(ratio, loss.low, loss.high) * advantage;
  const bool clipped = limited < plain;
  const Real bound = loss.dual * advantage;
  const bool dual = advantage < Real(0) && bound > (clipped ? limited : plain);
  Real a = clipped || dual || raw > limit || raw < -limit ? Real(0) : -plain;
  if (tokens.weights) a *= tokens.weights[i];
  if (tokens.ref) {
    const Real raw_ref = tokens.ref[i] - logprob;
    if (!(raw_ref > limit || raw_ref < -limit)) a -= loss.kl_coef * expm1(raw_ref);
  }
  return a;
}

}  // namespace sapo
