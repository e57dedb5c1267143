// Count, mean, sum of squared deviations and largest size, in one pass and mergeable in any grouping (Chan, Golub, LeVeque 1983).
#pragma once

#include "portable.h"

namespace sapo {

struct Moments {
  double count, mean, m2, size;  // size: largest |x|; a NaN shows in mean and m2
};

SAPO_HD double larger(double x, double y) { return y > x ? y : x; }

SAPO_HD Moments merge(Moments x, Moments y) {
  const double count = x.count + y.count;
  if (count == 0.0) return {0.0, 0.0, 0.0, 0.0};
  const double shift = y.mean - x.mean;
  const double share = y.count / count;
  return {count, x.mean + shift * share, x.m2 + y.m2 + shift * shift * x.count * share, larger(x.size, y.size)};
}

// Sums of deviations from `shift`, which must be one of the values summed (the first): its own squared deviation is then part of m2, so the
// subtraction in `finish` costs at most a factor `count` of the float64 precision, whatever the data.
struct Sums {
  double shift = 0.0, count = 0.0, sum = 0.0, squares = 0.0, size = 0.0;

  SAPO_HD void add(double x) {
    shift = count == 0.0 ? x : shift;
    const double d = x - shift;
    count += 1.0;
    sum += d;
    squares += d * d;
    size = larger(size, x < 0.0 ? -x : x);
  }

  SAPO_HD Moments finish() const {
    if (count == 0.0) return {0.0, 0.0, 0.0, 0.0};
    const double m2 = squares - sum * sum / count;
    return {count, shift + sum / count, m2 < 0.0 ? 0.0 : m2, size};
  }
};

// (x - mean) / (std + eps) with the population standard deviation, floored at min_std; nothing where the spread is no more than the rounding of
// the float32 values it came from (one value, or all equal). method: Targets.
struct Normalizer {
  double mean, scale;

  SAPO_HD static Normalizer of(Moments m, double eps, double min_std);

  SAPO_HD double operator()(double x) const { return scale == 0.0 ? 0.0 : (x - mean) * scale; }
};

SAPO_HD Normalizer Normalizer::of(Moments m, double eps, double min_std) {
  constexpr double kNoise = 4.0 * 1.1920928955078125e-07;  // four units in the last place of float32
  const double std = m.count > 0.0 ? sqrt(m.m2 / m.count) : 0.0;
  return {m.mean, std <= kNoise * m.size ? 0.0 : 1.0 / ((std < min_std ? min_std : std) + eps)};
}

}  // namespace sapo
