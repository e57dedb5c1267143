// torch.ops.sapo_fast.*: the schemas, and their CPU kernels.
#include "op_inputs.h"

#include <vector>

#include "gae.h"
#include "interface.h"

namespace sapo {
namespace {

// Least share of one thread: below it, waking the thread costs more than it saves.
constexpr int64_t kUnitsPerThread = 4;
constexpr int64_t kTurnsPerThread = kUnitsPerThread * cpu::kStretch;

void check_offsets(const Problem& p) {
  bool rise = p.offsets[0] == 0 && p.offsets[p.trajectories] == p.total;
  for (int64_t b = 0; b < p.trajectories && rise; ++b) rise = p.offsets[b] <= p.offsets[b + 1];
  STD_TORCH_CHECK(rise, "offsets must start at 0, never fall, and end at ", p.total);
}

Outputs run(cpu::Loop loop, Call call) {
  const Problem& problem = call.problem;
  check_offsets(problem);
  std::vector<cpu::Part> parts(cpu::units(problem));
  torch::stable::parallel_for(0, static_cast<int64_t>(parts.size()), kUnitsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) parts[unit] = cpu::run_unit(loop, problem, unit);
  });
  const bool sound = cpu::finish(problem, parts.data(), static_cast<int64_t>(parts.size()));
  STD_TORCH_CHECK(sound, "a number is not finite, or a token is paid before the first action of its trajectory");
  return call.outputs;
}

Outputs turn_gae(const Tensor& rewards, const Tensor& values, const OptionalTensor& q_values, const OptionalTensor& bootstrap,
                 const OptionalTensor& invalid, const OptionalTensor& valid, const Tensor& cu_turns, double gamma, double lam, double lam_v,
                 double invalid_penalty, bool check, bool moments) {
  return run(cpu::select_loops().turns,
             turn_call(rewards, values, q_values, bootstrap, invalid, valid, cu_turns, gamma, lam, lam_v, invalid_penalty, check, moments));
}

Outputs token_gae(const Tensor& rewards, const Tensor& values, const OptionalTensor& bootstrap, const Tensor& action_mask, const Tensor& cu_tokens,
                  double gamma, double lam, double lam_v, bool check, bool moments) {
  return run(cpu::select_loops().tokens, token_call(rewards, values, bootstrap, action_mask, cu_tokens, gamma, lam, lam_v, check, moments));
}

Tensor normalize(const Tensor& advantages, const Tensor& moments, const OptionalTensor& invalid, const OptionalTensor& valid, double invalid_penalty,
                 double eps, double min_std) {
  Tensor out = torch::stable::empty_like(advantages);
  const Scaling scaling = scaling_call(advantages, moments, invalid, valid, invalid_penalty, eps, min_std, out);
  const Normalizer normalizer = scaling.normalizer();
  torch::stable::parallel_for(0, scaling.total, kTurnsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) scaling.apply(normalizer, t);
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY(sapo_fast, library) {
  library.def(
      "turn_gae(Tensor rewards, Tensor values, Tensor? q_values, Tensor? bootstrap, Tensor? invalid, Tensor? valid, Tensor cu_turns, float gamma, "
      "float lam, float lam_v, float invalid_penalty, bool check, bool moments) -> (Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "token_gae(Tensor rewards, Tensor values, Tensor? bootstrap, Tensor action_mask, Tensor cu_tokens, float gamma, float lam, float lam_v, bool check, bool moments) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "normalize(Tensor advantages, Tensor moments, Tensor? invalid, Tensor? valid, float invalid_penalty, float eps, float min_std) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(sapo_fast, CPU, library) {
  library.impl("turn_gae", TORCH_BOX(&turn_gae));
  library.impl("token_gae", TORCH_BOX(&token_gae));
  library.impl("normalize", TORCH_BOX(&normalize));
}

}  // namespace sapo

extern "C" __attribute__((visibility("default"))) int sapo_fast_interface() { return SAPO_INTERFACE_VERSION; }
