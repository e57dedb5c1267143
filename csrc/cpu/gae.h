// Turn-level and token-level GAE on the CPU, free of torch. `gae_loops.cpp` is compiled once per instruction set; `select_loops` picks one.
#pragma once

#include "core/problem.h"

namespace sapo::cpu {

// Trajectories [first, last) of a problem: writes their targets, returns the moments.
using Loop = Moments (*)(const Problem&, int64_t first, int64_t last);

struct Loops {
  Loop turns, tokens;
  bool (*finite)(const float*, int64_t count);  // no NaN and no infinity among them
};

// The loops for this processor, chosen once.
const Loops& select_loops();

// A unit of work is every trajectory that begins in one stretch of this many turns: fixed by the data, never by the number of threads, so the
// order in which moments are merged, and with it every bit of the result, is too.
inline constexpr int64_t kStretch = 8192;

inline int64_t units(const Problem& problem) { return (problem.total + kStretch - 1) / kStretch; }

// First trajectory that begins at or after `position`.
inline int64_t first_from(const Problem& problem, int64_t position) {
  int64_t low = 0, high = problem.trajectories;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (problem.offsets[middle] < position) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

inline Moments run_unit(Loop loop, const Problem& problem, int64_t unit) {
  return loop(problem, first_from(problem, unit * kStretch), first_from(problem, (unit + 1) * kStretch));
}

// Merges the moments of all units, in order, into the problem's own.
inline void finish(const Problem& problem, const Moments* parts, int64_t count) {
  Moments all{0.0, 0.0, 0.0, 0.0};
  for (int64_t unit = 0; unit < count; ++unit) all = merge(all, parts[unit]);
  problem.moments[0] = all.count;
  problem.moments[1] = all.mean;
  problem.moments[2] = all.m2;
  problem.moments[3] = all.size;
}

}  // namespace sapo::cpu
