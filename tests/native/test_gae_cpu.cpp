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

Result run(const sapo::cpu::Loops& loops, const Case& c) {
  Result result(c);
  const sapo::Problem p = problem_of(c, result);
  std::vector<sapo::Moments> parts(static_cast<size_t>(sapo::cpu::units(p)));
  // Backwards: the order in which threads finish must not matter.
  const sapo::cpu::Loop loop = c.tokens ? loops.tokens : loops.turns;
  for (size_t unit = parts.size(); unit-- > 0;) parts[unit] = sapo::cpu::run_unit(loop, p, static_cast<int64_t>(unit));
  sapo::cpu::finish(p, parts.data(), static_cast<int64_t>(parts.size()));
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
    const Result result = run(loops, c);
    cases::check(c, result, label);
    const int64_t poisoned = cases::poison(c, random);
    if (poisoned >= 0) cases::check_confined(c, poisoned, result, run(loops, c), label);
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
