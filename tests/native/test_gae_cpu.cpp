// The CPU loops, of every instruction set this machine has, on random problems against extended precision; NaN confined; arrays that end where
// they say (the sanitizers watch).
//
// usage: test_gae_cpu [cases] [seed]
#include "cpu/gae.h"
#include "gae_cases.h"

namespace sapo::cpu {
namespace baseline {
extern const Loops loops;
}
#if defined(SAPO_HAVE_AVX2)
namespace avx2 {
extern const Loops loops;
}
#endif
}  // namespace sapo::cpu

namespace {

using cases::Case;
using cases::Random;
using cases::Result;

// No token before the first action of its trajectory is paid.
bool obeys(const Case& c) {
  for (int64_t b = 0; c.tokens && b < c.trajectories(); ++b) {
    for (auto t = static_cast<size_t>(c.wide_offsets[static_cast<size_t>(b)]); t < static_cast<size_t>(c.wide_offsets[static_cast<size_t>(b) + 1]); ++t) {
      if (c.actions[t]) break;
      if (c.rewards[t] != 0.0f) return false;
    }
  }
  return true;
}

// `sound` is what the checks must say.
Result run(const sapo::cpu::Loops& loops, const Case& c, bool sound) {
  Result result(c);
  sapo::Problem p = problem_of(c, result);
  p.check = true;
  std::vector<sapo::cpu::Part> parts(static_cast<size_t>(sapo::cpu::units(p)));
  // Backwards: the order in which threads finish must not matter.
  const sapo::cpu::Loop loop = c.tokens ? loops.tokens : loops.turns;
  for (size_t unit = parts.size(); unit-- > 0;) parts[unit] = sapo::cpu::run_unit(loop, p, static_cast<int64_t>(unit));
  if (sapo::cpu::finish(p, parts.data(), static_cast<int64_t>(parts.size())) != sound) {
    std::printf("the checks must say %s\n", sound ? "sound" : "unsound");
    std::exit(1);
  }
  return result;
}

void try_loops(const char* name, const sapo::cpu::Loops& loops, int64_t count, uint64_t seed) {
  Random random(seed);
  int64_t turns = 0;
  for (int64_t i = 0; i < count; ++i) {
    // Tiles here are the pieces of the loops (1,024) or a few vectors (8).
    const bool pieces = cases::chance(random, 0.2);
    Case c = cases::random_case(random, pieces ? 1024 : 8, pieces ? 30000 : 2000);
    turns += c.total();
    const std::string label = std::string(name) + " case " + std::to_string(i);
    const Result result = run(loops, c, obeys(c));
    cases::check(c, result, label);
    const int64_t poisoned = cases::poison(c, random);
    if (poisoned >= 0) cases::check_confined(c, poisoned, result, run(loops, c, false), label);
  }
  std::printf("%s: %lld random problems, %lld turns: right, confined\n", name, static_cast<long long>(count), static_cast<long long>(turns));
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t count = argc > 1 ? std::atoll(argv[1]) : 1000;
  const uint64_t seed = argc > 2 ? static_cast<uint64_t>(std::atoll(argv[2])) : 1;
  try_loops("baseline", sapo::cpu::baseline::loops, count, seed);
#if defined(SAPO_HAVE_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) try_loops("avx2", sapo::cpu::avx2::loops, count, seed);
#endif
  return 0;
}
