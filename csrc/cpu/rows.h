// Vocabulary rows on the CPU, free of torch: their statistics and the gradient of the loss (sapo_fast/row_pass.py has the formulas).
// `rows_loops.cpp` is compiled once per instruction set; `select_row_loops` picks one.
#pragma once

#include "core/ppo.h"
#include "core/row_stats.h"

namespace sapo::cpu {

enum class Type { kFloat, kBFloat16, kHalf };

// Columns that are read twice in a row, for their largest logit and for their sums: they stay in the first-level cache. w+ and w- cut a row into up to three
// pieces, whose last tiles may be short.
inline constexpr int64_t kTile = 4096;

// n actions on rows of logits [T, vocabulary], the last dimension contiguous.
struct RowProblem {
  const void* logits;
  int64_t stride;  // of logits, from row to row, in elements
  void* out;       // the gradient, possibly the logits themselves; null: none wanted
  int64_t out_stride;
  Type type;
  int64_t vocabulary;
  const int64_t* actions;  // [n]
  int64_t low, high;       // w+ and w- in ascending order
  float temperature;
  float* stats;        // [4, n]: log-prob, top, log_sum, spread
  int64_t n;
  const int64_t* next;  // [n] the next action on the same row, -1 after the last; null: every row has one

  // A and B, from the loss ...
  PolicyLoss<float> loss;
  TokenInputs<float> tokens;
  double scale;
  // ... or as given: [n]; b may be null.
  const float* a;
  const float* b;
};

// One row and every action on it, beginning with `first`: `row` of logits and out.
using RowLoop = void (*)(const RowProblem&, int64_t row, int64_t first);

struct RowLoops {
  RowLoop stats;      // writes stats
  RowLoop loss_grad;  // writes stats and, from the loss, the gradient
  RowLoop grad;       // reads stats, a and b; writes the gradient
};

// The loops for this processor and type, chosen once.
const RowLoops& select_row_loops(Type type);

}  // namespace sapo::cpu
