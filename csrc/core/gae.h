// The arithmetic of generalised advantage estimation, shared by the CPU and the CUDA loops.
//
// One trajectory is walked from its end. Everything later than turn t enters turn t through one number, the discounted future
//     F[t+1] = gamma * ((1 - lambda) * V[t+1] + lambda * G[t+1]),   F after the last turn = gamma * bootstrap (0 where the episode ended),
// and turn t then gives
//     G[t] = r[t] + F[t+1]                                 lambda-return, the target of V
//     A[t] = G[t] - V[t]                                   advantage
//     F[t] = gamma*lambda * G[t] + gamma*(1-lambda) * V[t]
// which is delta[t] + gamma*lambda*A[t+1] with the terms regrouped (method: Targets). F is an affine function of the F that follows it, so pieces of
// a trajectory compose (`Affine`), and a token that is no action (an observation) is the affine map F -> F + r: it neither steps nor decays,
// and a reward it carries goes to the action before it.
//
// Inputs and outputs are float32; everything between is float64, so a result carries one rounding however long the trajectory.
#pragma once

#include "portable.h"

namespace sapo {

// F -> a * F + b.
struct Affine {
  double a, b;
};

// The map of a later stretch followed by that of an earlier one (time runs backwards here: `later` is applied first).
SAPO_HD Affine compose(Affine earlier, Affine later) { return {earlier.a * later.a, earlier.a * later.b + earlier.b}; }

SAPO_HD double apply(Affine map, double future) { return map.a * future + map.b; }

// The two constants of one lambda.
struct Decay {
  double carried;  // gamma * lambda: weight of the return in the future before it
  double valued;   // gamma * (1 - lambda): weight of the value in it

  SAPO_HD static Decay of(double gamma, double lambda) { return {gamma * lambda, gamma - gamma * lambda}; }
};

// `Real` is double, or a vector of doubles on the CPU.
template <class Real>
SAPO_HD Real lambda_return(Real reward, Real future) {
  return reward + future;
}

template <class Real>
SAPO_HD Real future_before(Real lambda_return, Real value, Real carried, Real valued) {
  return carried * lambda_return + valued * value;
}

// The part of F[t] that does not depend on F[t+1].
template <class Real>
SAPO_HD Real offset_of(Real reward, Real value, Real carried, Real valued) {
  return carried * reward + valued * value;
}

// One-step target of Q with the action really taken next (SARSA); after the last turn `q_next` is the bootstrap.
template <class Real>
SAPO_HD Real sarsa_target(Real reward, Real q_next, Real gamma) {
  return reward + gamma * q_next;
}

// A token as an affine map of the future. `value` is that of an action, 0 for any other token.
SAPO_HD Affine token_map(bool action, double reward, double value, Decay decay) {
  const double carried = action ? decay.carried : 1.0;
  return {carried, offset_of(reward, value, carried, decay.valued)};
}

}  // namespace sapo
