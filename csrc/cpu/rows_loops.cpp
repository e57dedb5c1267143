// The loops of rows.h. Compiled several times with different instruction sets (see CMakeLists.txt), each in its own SAPO_ISA namespace.
//
// A row comes from memory once, tile by tile: a tile's largest logit is found while it comes into the first-level cache, then its exponentials relative to that
// are summed. The gradient is written from the row as it lies in the second-level cache. Its exponentials are made anew: keeping them would cost a store and a
// load of four bytes each, more than the arithmetic.
#ifndef SAPO_ISA
#error "define SAPO_ISA: the namespace of this instruction set"
#endif

#include "rows.h"
#include "rows_vector.h"

#include <algorithm>

namespace sapo::cpu::SAPO_ISA {
namespace {

constexpr int kChains = 2;  // sums in flight
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// A short vector's numbers, and -infinity behind them.
template <class T>
struct Padded {
  T lane[kWidth];

  Padded(const T* x, int64_t count) {
    std::fill_n(lane, kWidth, narrow<T>(kLowest));
    std::copy_n(x, count, lane);
  }
};

// `f(from)` for the vectors of a tile, the last one padded.
template <class T, class F>
SAPO_INLINE void each_vector(const T* x, int64_t count, F f) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) f(x + i);
  if (i < count) f(Padded<T>(x + i, count - i).lane);
}

template <class T>
float largest(const T* x, int64_t count) {
  Floats top[4];
  std::fill_n(top, 4, all(kLowest));
  int64_t i = 0;
  for (; i + 4 * kWidth <= count; i += 4 * kWidth) {
    for (int k = 0; k < 4; ++k) top[k] = maximum(get(x + i + k * kWidth), top[k]);
  }
  each_vector(x + i, count - i, [&](const T* from) { top[0] = maximum(get(from), top[0]); });
  const Floats four = maximum(maximum(top[0], top[1]), maximum(top[2], top[3]));
  float found = kLowest;
  for (int lane = 0; lane < kWidth; ++lane) found = four[lane] > found ? four[lane] : found;
  return found;
}

SAPO_INLINE float sum(const Floats (&x)[kChains]) {
  Floats all_chains = x[0];
  for (int k = 1; k < kChains; ++k) all_chains += x[k];
  float lanes[kWidth];
  put(lanes, all_chains);
  for (int width = kWidth / 2; width; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// (x - top) / temperature, where exp() still tells it from less. A NaN passes.
SAPO_INLINE Floats below(Floats x, Floats top, Floats cold) { return maximum(all(Floor<float>::value), (x - top) * cold); }

template <class T>
RowPart<float> read_tile(const T* x, int64_t count, float cold) {
  RowPart<float> part;
  part.top = largest(x, count);
  const Floats top = all(part.top == kLowest ? 0.0f : part.top), colds = all(cold);
  Floats rest[kChains], slope[kChains];
  std::fill_n(rest, kChains, all(0.0f));
  std::fill_n(slope, kChains, all(0.0f));
  int64_t tops = 0;
  const auto take = [&](const T* from, int k) {
    const Floats d = below(get(from), top, colds);
    const Floats e = exponential(d);
    rest[k] += drop_at_zero(e, d, tops);
    slope[k] = fused(e, d, slope[k]);
  };
  int64_t i = 0;
  for (; i + kChains * kWidth <= count; i += kChains * kWidth) {
    __builtin_prefetch(x + i + kTile, 0, 2);
    if (sizeof(T) * kChains * kWidth > 64) __builtin_prefetch(x + i + kTile + kWidth, 0, 2);
    for (int k = 0; k < kChains; ++k) take(x + i + k * kWidth, k);
  }
  each_vector(x + i, count - i, [&](const T* from) { take(from, 0); });
  part.rest = sum(rest) + static_cast<float>(tops - 1);
  part.slope = sum(slope);
  return part;
}

// q (B (log q + H) - A), with q = weight * exp(x / temperature - top). `out` may be `x`. Not fused: the largest logit must come out 0.
template <class T>
void write_tile(const T* x, T* out, int64_t count, float top, float cold, float weight, float a, float b, float spread) {
  const Floats tops = all(top), colds = all(cold), weights = all(weight), bs = all(b), minus_a = all(-a), spreads = all(spread);
  int64_t i = 0;
  const auto gradient = [&](const T* from) {
    const Floats d = maximum(all(Floor<float>::value), get(from) * colds - tops);
    return exponential(d) * weights * fused(bs, d + spreads, minus_a);
  };
  for (; i + kWidth <= count; i += kWidth) put(out + i, gradient(x + i));
  if (i < count) {
    Padded<T> last(x + i, count - i);
    put(last.lane, gradient(last.lane));
    std::copy_n(last.lane, count - i, out + i);
  }
}

// `f(begin, count)` for every tile of a row without w+ and w-, in order.
template <class F>
SAPO_INLINE void each_tile(const RowProblem& p, F f) {
  const int64_t edges[4] = {-1, p.low, p.high, p.vocabulary};
  for (int piece = 0; piece < 3; ++piece) {
    for (int64_t begin = edges[piece] + 1; begin < edges[piece + 1]; begin += kTile) f(begin, std::min(kTile, edges[piece + 1] - begin));
  }
}

template <class T>
RowPart<float> read_row(const RowProblem& p, const T* x, float cold) {
  RowPart<float> whole;
  each_tile(p, [&](int64_t begin, int64_t count) { whole = merge(whole, read_tile(x + begin, count, cold), cold); });
  return whole;
}

// Writes the statistics of every action on the row.
template <class T>
void record(const RowProblem& p, const T* x, int64_t first) {
  const float cold = 1.0f / p.temperature;
  const RowPart<float> whole = read_row(p, x, cold);
  for (int64_t i = first; i >= 0; i = p.next ? p.next[i] : -1) {
    const RowNumbers<float> row = finish(whole, widen(x[p.actions[i]]), p.temperature);
    p.stats[i] = row.logprob;
    p.stats[p.n + i] = whole.top * cold;  // rounded as write_tile rounds
    p.stats[2 * p.n + i] = row.log_sum;
    p.stats[3 * p.n + i] = row.spread;
  }
}

RowNumbers<float> recorded(const RowProblem& p, int64_t i) {
  return {p.stats[i], p.stats[p.n + i], p.stats[2 * p.n + i], p.stats[3 * p.n + i]};
}

// A and B of action i, divided by the temperature.
struct Slopes {
  float a, b;
};

Slopes slopes(const RowProblem& p, int64_t i) {
  if (p.a) return {p.a[i] / p.temperature, p.b ? p.b[i] / p.temperature : 0.0f};
  const float a = static_cast<float>(policy_slope(p.loss, p.tokens, i, p.stats[i]) * p.scale);
  return {a / p.temperature, static_cast<float>(p.loss.entropy_coef * p.scale) / p.temperature};
}

Slopes add_slopes(const RowProblem& p, int64_t first) {
  Slopes all = slopes(p, first);
  for (int64_t i = p.next ? p.next[first] : -1; i >= 0; i = p.next[i]) {
    const Slopes one = slopes(p, i);
    all.a += one.a;
    all.b += one.b;
  }
  return all;
}

// From the recorded statistics. Columns that the common formula does not cover are written last: the actions, w+ and w-.
template <class T>
void write_row(const RowProblem& p, const T* x, T* out, int64_t first) {
  const Slopes all = add_slopes(p, first);
  const RowNumbers<float> row = recorded(p, first);
  if (all.a == 0.0f && all.b == 0.0f) {
    std::fill_n(out, p.vocabulary, narrow<T>(0.0f));
  } else {
    const float cold = 1.0f / p.temperature, weight = exp(-row.log_sum);
    each_tile(p, [&](int64_t begin, int64_t count) {
      write_tile(x + begin, out + begin, count, row.top, cold, weight, all.a, all.b, row.spread);
    });
  }
  for (int64_t i = first; i >= 0; i = p.next ? p.next[i] : -1) {
    float same = 0.0f;
    for (int64_t k = first; k >= 0; k = p.next ? p.next[k] : -1) same += p.actions[k] == p.actions[i] ? slopes(p, k).a : 0.0f;
    out[p.actions[i]] = narrow<T>(slope_at_action(recorded(p, i), all.a, all.b, same));
  }
  out[p.low] = out[p.high] = narrow<T>(0.0f);
}

template <class T>
const T* in(const RowProblem& p, int64_t row) {
  return static_cast<const T*>(p.logits) + row * p.stride;
}

template <class T>
void stats(const RowProblem& p, int64_t row, int64_t first) {
  record(p, in<T>(p, row), first);
}

template <class T>
void grad(const RowProblem& p, int64_t row, int64_t first) {
  write_row(p, in<T>(p, row), static_cast<T*>(p.out) + row * p.out_stride, first);
}

template <class T>
void loss_grad(const RowProblem& p, int64_t row, int64_t first) {
  stats<T>(p, row, first);
  grad<T>(p, row, first);
}

}  // namespace

// By sapo::cpu::Type.
extern const RowLoops row_loops[3] = {
    {stats<float>, loss_grad<float>, grad<float>},
    {stats<BFloat16>, loss_grad<BFloat16>, grad<BFloat16>},
    {stats<Half>, loss_grad<Half>, grad<Half>},
};

}  // namespace sapo::cpu::SAPO_ISA
