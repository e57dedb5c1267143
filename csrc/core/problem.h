// What one GAE call works on; plain pointers, so that it serves the CPU and, copied into a kernel's arguments, the GPU.
//
// T turns or tokens of B trajectories, packed: trajectory b owns [offsets[b], offsets[b + 1]).
#pragma once

#include "gae.h"
#include "moments.h"

namespace sapo {

struct Offsets {
  const void* data;  // B + 1 entries
  bool wide;         // int64, else int32

  SAPO_HD int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<int64_t>(static_cast<const int32_t*>(data)[i]);
  }
};

struct Problem {
  int64_t total;         // T
  int64_t trajectories;  // B
  Offsets offsets;
  const float* rewards;
  const float* values;
  const float* q_values;   // null: no Q targets
  const float* bootstrap;  // per trajectory; null: 0
  const uint8_t* actions;  // tokens only: 1 where the token is an action
  const uint8_t* invalid;  // turns only: 1 where the action was invalid; null: none
  const uint8_t* valid;    // turns only: 0 where a turn stays out of the moments; null: all count
  float* advantages;
  float* v_targets;
  float* q_targets;
  double* moments;  // 4: count, mean, m2, size of the advantages as returned (turns: valid ones, less the penalty; tokens: actions); null: not wanted
  double gamma;
  Decay policy;            // of the advantages
  Decay value;             // of the value targets
  double invalid_penalty;  // off the advantage of an invalid action, in the moments only
  bool check;              // look at the data too; the CPU alone does

  SAPO_HD bool two() const { return policy.carried != value.carried || policy.valued != value.valued; }
};

// Normalisation of advantages by their moments, elementwise.
struct Scaling {
  int64_t total;
  const float* advantages;
  const double* moments;   // as in Problem
  const uint8_t* invalid;  // null: none
  const uint8_t* valid;    // null: all; others become 0
  float* out;
  double invalid_penalty, eps, min_std;

  SAPO_HD Normalizer normalizer() const { return Normalizer::of({moments[0], moments[1], moments[2], moments[3]}, eps, min_std); }

  SAPO_HD void apply(const Normalizer& normalizer, int64_t t) const {
    const double penalty = invalid && invalid[t] ? invalid_penalty : 0.0;
    out[t] = valid && !valid[t] ? 0.0f : static_cast<float>(normalizer(advantages[t] - penalty));
  }
};

}  // namespace sapo
