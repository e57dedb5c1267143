// Statistics of a row of logits and its gradient, shared by the CPU and the CUDA row pass (sapo_fast/row_pass.py has the formulas).
//
// A row without w+ and w- is cut into parts in any way; a part is carried relative to its own largest logit m, and parts merge:
//     rest  = sum of exp((x_j - m) / temperature) over all j but one that attains m       (an empty part: m = -inf, rest = -1)
//     slope = sum of (x_j - m) / temperature * exp((x_j - m) / temperature)
// so nothing cancels when one token takes all the mass: 1 is never added to a small `rest` before log1p.
#pragma once

#include "portable.h"

namespace sapo {

// exp() of it is 0 in the type itself; a finite floor keeps 0 * x = 0 where x would be -inf.
template <class Real>
struct Floor;
template <>
struct Floor<float> {
  static constexpr float value = -128.0f;
};
template <>
struct Floor<double> {
  static constexpr double value = -1000.0;
};

// A NaN passes.
template <class Real>
SAPO_HD Real floored(Real x) {
  return x < Floor<Real>::value ? Floor<Real>::value : x;
}

template <class Real>
struct RowPart {
  Real top = -kInfinity<Real>;  // raw, not divided by the temperature
  Real rest = Real(-1);
  Real slope = Real(0);
};

// `cold` = 1 / temperature. The order of the arguments is part of the result: merge in one fixed order.
template <class Real>
SAPO_HD RowPart<Real> merge(RowPart<Real> x, RowPart<Real> y, Real cold) {
  if (y.top > x.top) {
    const RowPart<Real> swapped = x;
    x = y;
    y = swapped;
  }
  const Real d = floored(y.top == x.top ? Real(0) : (y.top - x.top) * cold);
  const Real weight = exp(d);
  const Real mass = Real(1) + y.rest;
  return {x.top, x.rest + weight * mass, x.slope + weight * (y.slope + d * mass)};
}

template <class Real>
struct RowNumbers {
  Real logprob, top, log_sum, spread;

  SAPO_HD Real entropy() const { return log_sum + spread; }
};

// `taken`: the raw logit of the action, -inf if it is w+ or w-.
template <class Real>
SAPO_HD RowNumbers<Real> finish(RowPart<Real> row, Real taken, Real temperature) {
  const Real log_sum = log1p(row.rest);
  return {(taken - row.top) / temperature - log_sum, row.top / temperature, log_sum, -row.slope / (Real(1) + row.rest)};
}

// dL/dz of a column that is neither the action nor w+, w-; a and b divided by the temperature, d = x / temperature - top, floored.
template <class Real>
SAPO_HD Real slope_at(Real q, Real d, Real a, Real b, Real spread) {
  return q * (b * (d + spread) - a);
}

// dL/dz of the action: P (1 - q) - (A - P) q + B q (log q + H), where A and B are sums over all occurrences of the row and P over those with this action
// (`same`); divided by the temperature. 1 - q comes from log q: exact where q is near 1.
template <class Real>
SAPO_HD Real slope_at_action(const RowNumbers<Real>& row, Real a, Real b, Real same) {
  const Real q = exp(row.logprob);
  Real g = same * -expm1(row.logprob) - (a - same) * q;
  if (q > Real(0)) g += b * q * (row.logprob + row.entropy());
  return g;
}

}  // namespace sapo
