// The CUDA kernels' own source, on the CPU, under the emulator: random problems against extended precision, bit-for-bit repetition under other schedules, NaN
// confined, broken offsets survived.
//
// usage: test_gae_cuda [cases] [seed]
#include "cuda_emul.h"

#include "cuda/gae.cuh"
#include "gae_cases.h"

namespace {

using cases::Case;
using cases::Random;
using cases::Result;

template <class S, bool kTokens, bool kTwo, int kWidth>
void run_kernel(const sapo::Problem& p, emul::Options options) {
  const sapo::cuda::Plan<S> plan(p.total, p.trajectories, kWidth);
  // What need not be cleared is not: a kernel that reads it before anyone wrote it shows.
  std::vector<double> memory(static_cast<size_t>((plan.bytes() + 7) / 8), std::numeric_limits<double>::quiet_NaN());
  std::memset(memory.data(), 0, static_cast<size_t>(plan.zeroed_bytes()));
  const sapo::cuda::Workspace w = plan.carve(memory.data());
  emul::launch(static_cast<unsigned>(w.blocks()), S::kThreads, options, [&] { sapo::cuda::gae_kernel<S, kTokens, kTwo, kWidth>(p, w); });
}

template <class S, int kWidth>
void run_shape(const sapo::Problem& p, emul::Options options) {
  if (p.actions) {
    p.two() ? run_kernel<S, true, true, kWidth>(p, options) : run_kernel<S, true, false, kWidth>(p, options);
  } else {
    p.two() ? run_kernel<S, false, true, kWidth>(p, options) : run_kernel<S, false, false, kWidth>(p, options);
  }
}

struct Shape {
  const char* name;
  int64_t tile, most_turns;
  void (*run)(const sapo::Problem&, emul::Options);
};

template <int kWarps, int kWindows, int kGroup, int kWidth>
constexpr Shape shape(const char* name, int64_t most_turns) {
  using S = sapo::cuda::Sizes<kWarps, kWindows, kGroup>;
  return {name, S::kTile, most_turns, run_shape<S, kWidth>};
}

// Small tiles and groups meet every path with few turns; the last is the shape that is launched on a GPU.
constexpr Shape kShapes[] = {
    shape<2, 2, 3, 32>("2 warps x 2, groups of 3", 2000),
#if !defined(SAPO_FEW_SHAPES)  // mutate.py compiles many times
    shape<1, 1, 2, 32>("1 warp, groups of 2", 700),
    shape<2, 1, 2, 8>("2 warps, groups of 2", 1200),
    shape<3, 1, 32, 8>("3 warps, groups of 32", 1500),
    shape<8, 2, 32, 32>("as launched", 6000),
#endif
};
constexpr int64_t kCount = sizeof kShapes / sizeof kShapes[0];

Result run(const Shape& shape, const Case& c, emul::Options options) {
  Result result(c);
  shape.run(problem_of(c, result), options);
  return result;
}

void break_offsets(Case& c, Random& random) {
  for (int64_t& x : c.wide_offsets) {
    if (cases::chance(random, 0.3)) x += cases::below(random, 400) - 200;
  }
  if (!c.narrow_offsets.empty()) c.narrow_offsets.assign(c.wide_offsets.begin(), c.wide_offsets.end());
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t count = argc > 1 ? std::atoll(argv[1]) : 1000;
  Random random(argc > 2 ? static_cast<uint64_t>(std::atoll(argv[2])) : 1);
  int64_t turns = 0;
  for (int64_t i = 0; i < count; ++i) {
    const bool rare = cases::chance(random, 0.02);  // the large shape is slow here
    const Shape& shape = kShapes[rare || kCount == 1 ? kCount - 1 : cases::below(random, kCount - 1)];
    Case c = cases::random_case(random, shape.tile, shape.most_turns);
    turns += c.total();
    const std::string name = "case " + std::to_string(i) + " (" + shape.name + ")";
    emul::Options options{static_cast<unsigned>(random()), 1 + static_cast<unsigned>(cases::below(random, 5))};
    const Result result = run(shape, c, options);
    cases::check(c, result, name);
    if (cases::chance(random, 0.2)) {
      options = {static_cast<unsigned>(random()), 1 + static_cast<unsigned>(cases::below(random, 12))};
      if (!run(shape, c, options).same_bits(result)) {
        std::printf("%s: another schedule gives other bits\n", name.c_str());
        return 1;
      }
    }
    if (cases::chance(random, 0.2)) {
      const int64_t poisoned = cases::poison(c, random);
      if (poisoned >= 0) cases::check_confined(c, poisoned, result, run(shape, c, options), name);
    }
    if (cases::chance(random, 0.1) && c.trajectories() > 0) {
      break_offsets(c, random);
      run(shape, c, options);  // must end, within bounds
    }
  }
  std::printf("%lld random problems, %lld turns: right, repeatable, confined\n", static_cast<long long>(count), static_cast<long long>(turns));
  return 0;
}
