// Turn-level and token-level GAE on the CPU, free of torch. `gae_loops.cpp` is compiled once per instruction set; `select_loops` picks one.
//
// T turns or tokens of B trajectories, packed: trajectory b owns [offsets[b], offsets[b + 1]).
#pragma once

#include <cstdint>

#include "core/gae.h"
#include "core/moments.h"

namespace sapo::cpu {

struct Offsets {
  const void* data;  // B + 1 entries
  bool wide;         // int64, else int32

  int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<int64_t>(static_cast<const int32_t*>(data)[i]);
  }
};

struct Problem {
  const float* rewards;
  const float* values;
  const float* q_values;   // null: no Q targets
  const float* bootstrap;  // null: 0 after every trajectory
  const uint8_t* actions;  // tokens only: 1 where the token is an action
  const uint8_t* invalid;  // turns only: 1 where the action was invalid; null: none
  const uint8_t* valid;    // turns only: 0 where a turn stays out of the moments; null: all count
  float* advantages;
  float* v_targets;
  float* q_targets;
  double gamma;
  Decay policy;             // of the advantages
  Decay value;              // of the value targets
  bool two;                 // the two differ
  double invalid_penalty;   // off the advantage of an invalid action, in the moments only
};

// Trajectories [first, last) of a problem: writes their targets, returns the moments of their advantages (turns: valid ones, less the penalty;
// tokens: actions).
using Loop = Moments (*)(const Problem&, const Offsets&, int64_t first, int64_t last);

struct Loops {
  Loop turns, tokens;
};

// The loops for this processor, chosen once.
const Loops& select_loops();

// A unit of work is every trajectory that begins in one stretch of this many turns: fixed by the data, never by the number of threads, so the
// order in which moments are merged, and with it every bit of the result, is too.
inline constexpr int64_t kStretch = 8192;

inline int64_t units(int64_t total) { return (total + kStretch - 1) / kStretch; }

// First trajectory that begins at or after `position`.
inline int64_t first_from(const Offsets& offsets, int64_t trajectories, int64_t position) {
  int64_t low = 0, high = trajectories;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (offsets[middle] < position) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

inline Moments run_unit(Loop loop, const Problem& problem, const Offsets& offsets, int64_t trajectories, int64_t unit) {
  const int64_t first = first_from(offsets, trajectories, unit * kStretch);
  const int64_t last = first_from(offsets, trajectories, (unit + 1) * kStretch);
  return loop(problem, offsets, first, last);
}

}  // namespace sapo::cpu
