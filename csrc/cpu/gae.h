// Turn-level and token-level GAE on the CPU, free of torch. `gae_loops.cpp` is compiled once per instruction set; `select_loops` picks one.
#pragma once

#include "core/problem.h"

namespace sapo::cpu {

struct Part {
  Moments moments{0.0, 0.0, 0.0, 0.0};
  bool sound = true;  // with Problem::check: every number finite, and no token paid before the first action of its trajectory
};

// Trajectories [first, last) of a problem: writes their targets.
using Loop = Part (*)(const Problem&, int64_t first, int64_t last);

struct Loops {
  Loop turns, tokens;
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

inline Part run_unit(Loop loop, const Problem& problem, int64_t unit) {
  return loop(problem, first_from(problem, unit * kStretch), first_from(problem, (unit + 1) * kStretch));
}

// Merges the moments of all units, in order, into the problem's own. False: `check` found something unsound.
inline bool finish(const Problem& problem, const Part* parts, int64_t count) {
  Part all;
  for (int64_t unit = 0; unit < count; ++unit) {
    all.moments = merge(all.moments, parts[unit].moments);
    all.sound = all.sound && parts[unit].sound;
  }
  if (problem.moments) {
    problem.moments[0] = all.moments.count;
    problem.moments[1] = all.moments.mean;
    problem.moments[2] = all.moments.m2;
    problem.moments[3] = all.moments.size;
  }
  return all.sound;
}

}  // namespace sapo::cpu
