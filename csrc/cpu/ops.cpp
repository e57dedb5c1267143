// torch.ops.sapo_fast.*: the schemas, and their CPU kernels.
#include "op_inputs.h"

#include <atomic>
#include <vector>

#include "gae.h"
#include "interface.h"

namespace sapo {
namespace {

// Least share of one thread: below it, waking the thread costs more than it saves.
constexpr int64_t kUnitsPerThread = 4;
constexpr int64_t kTurnsPerThread = kUnitsPerThread * cpu::kStretch;

bool offsets_rise(const Offsets& offsets, int64_t trajectories, int64_t total) {
  bool rise = offsets[0] == 0 && offsets[trajectories] == total;
  for (int64_t b = 0; b < trajectories && rise; ++b) rise = offsets[b] <= offsets[b + 1];
  return rise;
}

Outputs run(cpu::Loop loop, Call call) {
  const Problem& problem = call.problem;
  STD_TORCH_CHECK(offsets_rise(problem.offsets, problem.trajectories, problem.total), "offsets must start at 0, never fall, and end at ",
                  problem.total);
  std::vector<Moments> parts(cpu::units(problem));
  torch::stable::parallel_for(0, static_cast<int64_t>(parts.size()), kUnitsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) parts[unit] = cpu::run_unit(loop, problem, unit);
  });
  cpu::finish(problem, parts.data(), static_cast<int64_t>(parts.size()));
  return call.outputs;
}

Outputs turn_gae(const Tensor& rewards, const Tensor& values, const OptionalTensor& q_values, const OptionalTensor& bootstrap,
                 const OptionalTensor& invalid, const OptionalTensor& valid, const Tensor& cu_turns, double gamma, double lam, double lam_v,
                 double invalid_penalty) {
  return run(cpu::select_loops().turns,
             turn_call(rewards, values, q_values, bootstrap, invalid, valid, cu_turns, gamma, lam, lam_v, invalid_penalty));
}

Outputs token_gae(const Tensor& rewards, const Tensor& values, const OptionalTensor& bootstrap, const Tensor& action_mask, const Tensor& cu_tokens,
                  double gamma, double lam, double lam_v) {
  return run(cpu::select_loops().tokens, token_call(rewards, values, bootstrap, action_mask, cu_tokens, gamma, lam, lam_v));
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

bool all_finite(const OptionalTensor& x) {
  if (!x) return true;
  const auto finite = cpu::select_loops().finite;
  const float* from = floats(*x);
  std::atomic<bool> good{true};
  torch::stable::parallel_for(0, x->numel(), kTurnsPerThread, [&](int64_t begin, int64_t end) {
    if (!finite(from + begin, end - begin)) good = false;
  });
  return good;
}

// Whether the data obey every rule: offsets rise from 0 to the end, numbers are finite, and with `actions` no token before the first action of its
// trajectory carries a reward. Python asks this first and looks for words only after a no.
bool sound(const Tensor& rewards, const OptionalTensor& values, const OptionalTensor& q_values, const OptionalTensor& bootstrap,
           const OptionalTensor& actions, const Tensor& offset_tensor) {
  check_inputs(rewards, values ? *values : rewards, q_values, bootstrap, offset_tensor);
  check_flags("actions", actions, rewards);
  const Offsets offsets = offsets_of(offset_tensor);
  const int64_t trajectories = offset_tensor.numel() - 1;
  if (!offsets_rise(offsets, trajectories, rewards.numel())) return false;
  if (!all_finite(rewards) || !all_finite(values) || !all_finite(q_values) || !all_finite(bootstrap)) return false;
  if (actions) {
    const float* reward = floats(rewards);
    const uint8_t* action = bytes(*actions);
    for (int64_t b = 0; b < trajectories; ++b) {
      for (int64_t t = offsets[b]; t < offsets[b + 1] && !action[t]; ++t) {
        if (reward[t] != 0.0f) return false;
      }
    }
  }
  return true;
}

}  // namespace

STABLE_TORCH_LIBRARY(sapo_fast, library) {
  library.def(
      "turn_gae(Tensor rewards, Tensor values, Tensor? q_values, Tensor? bootstrap, Tensor? invalid, Tensor? valid, Tensor cu_turns, float gamma, "
      "float lam, float lam_v, float invalid_penalty) -> (Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "token_gae(Tensor rewards, Tensor values, Tensor? bootstrap, Tensor action_mask, Tensor cu_tokens, float gamma, float lam, float lam_v) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "normalize(Tensor advantages, Tensor moments, Tensor? invalid, Tensor? valid, float invalid_penalty, float eps, float min_std) -> Tensor");
  library.def("sound(Tensor rewards, Tensor? values, Tensor? q_values, Tensor? bootstrap, Tensor? actions, Tensor offsets) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(sapo_fast, CPU, library) {
  library.impl("turn_gae", TORCH_BOX(&turn_gae));
  library.impl("token_gae", TORCH_BOX(&token_gae));
  library.impl("normalize", TORCH_BOX(&normalize));
  library.impl("sound", TORCH_BOX(&sound));
}

}  // namespace sapo

extern "C" __attribute__((visibility("default"))) int sapo_fast_interface() { return SAPO_INTERFACE_VERSION; }
