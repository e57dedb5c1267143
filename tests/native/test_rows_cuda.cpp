// The row pass' CUDA source on the CPU, under the emulator: random problems against extended precision, the same bits under other schedules, NaN confined,
// rows and actions that do not exist survived.
//
// usage: test_rows_cuda [cases] [seed]
#include "cuda/device.h"

#include "cuda/rows.cuh"
#include "row_cases.h"

namespace {

using namespace sapo::cuda;
using cases::Case;
using cases::Random;
using cases::Result;

template <class F>
void with_type(Type type, F f) {
#if !defined(SAPO_FEW_SHAPES)  // mutate.py compiles many times
  if (type == Type::float32) f(Float32{});
  if (type == Type::float16) f(Float16{});
#endif
  if (type == Type::bfloat16) f(BFloat16{});
}

unsigned blocks_of(const RowsProblem& p) { return static_cast<unsigned>(p.count); }

void run_stats(const RowsProblem& p, unsigned threads, emul::Options options) {
  with_type(p.type, [&](auto d) { emul::launch(blocks_of(p), threads, options, [&] { stream_kernel<decltype(d), true, false>(p); }); });
}

void run_grad(const RowsProblem& p, unsigned threads, emul::Options options) {
  with_type(p.type, [&](auto d) {
    emul::launch(blocks_of(p), threads, options, [&] { stream_kernel<decltype(d), false, true>(p); });
    if (p.first) emul::launch(1, 256, options, [&] { actions_kernel<decltype(d)>(p); });
  });
}

void run_streamed_loss(const RowsProblem& p, unsigned threads, emul::Options options) {
  with_type(p.type, [&](auto d) { emul::launch(blocks_of(p), threads, options, [&] { stream_kernel<decltype(d), true, true>(p); }); });
}

// `least`: blocks of a cluster. False: the row does not fit into so few vectors a thread.
template <int kVectors>
bool run_resident_loss(const RowsProblem& p, int least, emul::Options options) {
  bool fits = false;
  with_type(p.type, [&](auto d) {
    using D = decltype(d);
    const int vectors = (p.width + 2 * D::kLanes - 2) / D::kLanes;
    for (int cluster = least; cluster <= kMostCluster; cluster *= 2) {
      const int threads = (vectors + 32 * kVectors * cluster - 1) / (32 * kVectors * cluster) * 32;
      if (threads > 96) continue;
      options.cluster = static_cast<unsigned>(cluster);
      fits = true;
      const unsigned blocks = blocks_of(p) * options.cluster;
      if (cluster == 1) {
        emul::launch(blocks, static_cast<unsigned>(threads), options, [&] { resident_kernel<D, kVectors, false>(p, 1); });
      } else {
        emul::launch(blocks, static_cast<unsigned>(threads), options, [&] { resident_kernel<D, kVectors, true>(p, cluster); });
      }
      return;
    }
  });
  return fits;
}

[[noreturn]] void complain(const std::string& name, const char* what) {
  std::printf("%s: %s\n", name.c_str(), what);
  std::exit(1);
}

// The loss in one pass, in one of the ways that a launch may choose.
struct Way {
  int kind, least;
  unsigned threads;

  void run(const RowsProblem& p, emul::Options options) const {
    if (kind == 0 && run_resident_loss<1>(p, least, options)) return;
#if !defined(SAPO_FEW_SHAPES)
    if (kind <= 1 && run_resident_loss<2>(p, least, options)) return;
    if (kind <= 2 && run_resident_loss<8>(p, least, options)) return;
#endif
    run_streamed_loss(p, threads, options);
  }
};

Result run(const Way& way, Case& c, emul::Options options) {
  Result result(c);
  way.run(problem_of(c, result), options);
  return result;
}

emul::Options schedule(Random& random) { return {static_cast<unsigned>(random()), 1 + static_cast<unsigned>(cases::below(random, 5))}; }

void one_pass(Random& random, const std::string& name) {
  Case c = cases::random_case(random, 1500, true);
  const Way way{static_cast<int>(cases::below(random, 4)), 1 << cases::below(random, 4), 32u << cases::below(random, 2)};
  Result result = run(way, c, schedule(random));
  cases::check_stats(c, result, name);
  cases::check_grad(c, result, true, {}, {}, name);
  if (cases::chance(random, 0.3) && !run(way, c, schedule(random)).same_bits(result)) complain(name, "another schedule gives other bits");

  if (cases::chance(random, 0.3)) {  // a NaN stays in its row
    const int64_t row = c.row(0);
    Case spoilt = c;
    spoilt.logits.set(row, c.actions[0], sapo::kNaN<float>);
    Result found = run(way, spoilt, schedule(random));
    if (!std::isnan(found.logprob[0])) complain(name, "a NaN left no trace");
    for (int64_t i = 1; i < c.count; ++i) {
      if (found.logprob[static_cast<size_t>(i)] != result.logprob[static_cast<size_t>(i)]) complain(name, "a NaN left its row");
    }
    cases::Buffer &one = c.in_place ? found.logits : found.out, &other = c.in_place ? result.logits : result.out;
    for (int64_t at = 0; at < c.height; ++at) {
      for (int j = 0; j < c.width && at != row; ++j) {
        if (std::memcmp(one.at(at, j), other.at(at, j), static_cast<size_t>(cases::size_of(c.type))) != 0) complain(name, "a NaN left its row");
      }
    }
  }
  if (cases::chance(random, 0.1) && c.by_rows) {  // must end, within bounds
    c.rows[0] = cases::chance(random, 0.5) ? -1 : c.height;
    for (int64_t& action : c.actions) action = cases::chance(random, 0.5) ? -1 : c.width;
    Result found = run(way, c, schedule(random));
    if (found.logprob[0] != -7e33f) complain(name, "a row that does not exist was worked on");
    for (size_t i = 1; i < found.logprob.size(); ++i) {
      if (!std::isnan(found.logprob[i])) complain(name, "an action that does not exist has a log-prob");
    }
  }
}

void two_passes(Random& random, const std::string& name) {
  Case c = cases::random_case(random, 1500, false);
  if (!c.by_rows) c.distinct = true;
  const unsigned threads = 32u << cases::below(random, 2);
  Result result(c);
  run_stats(problem_of(c, result), threads, schedule(random));
  cases::check_stats(c, result, name);
  if (result.logits.memory != c.logits.memory || result.out.memory != c.out.memory) complain(name, "statistics wrote to the logits or the gradient");
  const std::vector<float> a = c.a, b = c.b;
  if (!c.distinct) merge_repeats(c);
  Result again = result;
  run_grad(problem_of(c, result), threads, schedule(random));
  cases::check_grad(c, result, false, a, b, name);
  if (cases::chance(random, 0.3)) {
    run_grad(problem_of(c, again), threads, schedule(random));
    if (!again.same_bits(result)) complain(name, "another schedule gives another gradient");
  }
}

void scaling(Random& random, const std::string& name) {
  Case c = cases::random_case(random, 300, true);
  Result result(c);
  const double factor = cases::chance(random, 0.3) ? 1.0 : 0.25;
  with_type(c.type, [&](auto d) {
    const Matrix x = result.logits.matrix();
    emul::launch(static_cast<unsigned>(c.height), 32, schedule(random), [&] { scale_kernel<decltype(d)>(x, c.width, &factor); });
  });
  cases::Buffer want = c.logits;
  for (int64_t row = 0; row < c.height && factor != 1.0; ++row) {
    for (int j = 0; j < c.width; ++j) {
      want.set(row, j, want.get(row, j) * static_cast<float>(factor));
      const bool both_nan = std::isnan(want.get(row, j)) && std::isnan(result.logits.get(row, j));
      if (both_nan) std::memcpy(want.at(row, j), result.logits.at(row, j), static_cast<size_t>(cases::size_of(c.type)));
    }
  }
  if (want.memory != result.logits.memory) complain(name, "wrong product");
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t count = argc > 1 ? std::atoll(argv[1]) : 500;
  Random random(argc > 2 ? static_cast<uint64_t>(std::atoll(argv[2])) : 1);
  for (int64_t i = 0; i < count; ++i) {
    const std::string name = "case " + std::to_string(i);
    const int64_t kind = cases::below(random, 10);
    if (kind < 6) {
      one_pass(random, name + ", one pass");
    } else if (kind < 9) {
      two_passes(random, name + ", two passes");
    } else {
      scaling(random, name + ", scaling");
    }
  }
  std::printf("%lld random problems: right, repeatable, confined\n", static_cast<long long>(count));
  return 0;
}
