// torch.ops.sapo_fast.*: the schemas, and their CPU kernels.
#include "op_inputs.h"

#include <algorithm>
#include <vector>

#include "gae.h"
#include "interface.h"

namespace sapo {
namespace {

// Least share of one thread: below it, starting the thread costs more than it saves.
constexpr int64_t kUnitsPerThread = 4;
constexpr int64_t kTurnsPerThread = kUnitsPerThread * cpu::kStretch;

void check_offsets(const cpu::Offsets& offsets, int64_t trajectories, int64_t total) {
  bool rising = offsets[0] == 0 && offsets[trajectories] == total;
  for (int64_t b = 0; b < trajectories && rising; ++b) rising = offsets[b] <= offsets[b + 1];
  STD_TORCH_CHECK(rising, "offsets must start at 0, never fall, and end at ", total);
}

Outputs run(cpu::Loop loop, cpu::Problem problem, const Tensor& rewards, const Tensor& offset_tensor) {
  const int64_t total = rewards.numel(), trajectories = offset_tensor.numel() - 1;
  const cpu::Offsets offsets{offset_tensor.const_data_ptr(), offset_tensor.scalar_type() == ScalarType::Long};
  check_offsets(offsets, trajectories, total);
  Outputs outputs = make_outputs(rewards, problem.q_values != nullptr);
  problem.advantages = writable(std::get<0>(outputs));
  problem.v_targets = writable(std::get<1>(outputs));
  problem.q_targets = writable(std::get<2>(outputs));
  std::vector<Moments> parts(cpu::units(total));
  torch::stable::parallel_for(0, static_cast<int64_t>(parts.size()), kUnitsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) parts[unit] = cpu::run_unit(loop, problem, offsets, trajectories, unit);
  });
  Moments all{0.0, 0.0, 0.0, 0.0};
  for (const Moments& part : parts) all = merge(all, part);
  auto* moments = static_cast<double*>(std::get<3>(outputs).mutable_data_ptr());
  moments[0] = all.count;
  moments[1] = all.mean;
  moments[2] = all.m2;
  moments[3] = all.size;
  return outputs;
}

Outputs turn_gae(const Tensor& rewards, const Tensor& values, const OptionalTensor& q_values, const OptionalTensor& bootstrap,
                 const OptionalTensor& invalid, const OptionalTensor& valid, const Tensor& cu_turns, double gamma, double lam, double lam_v,
                 double invalid_penalty) {
  check_inputs(rewards, values, q_values, bootstrap, cu_turns);
  check_flags("invalid", invalid, rewards);
  check_flags("valid", valid, rewards);
  cpu::Problem problem{};
  problem.rewards = floats(rewards);
  problem.values = floats(values);
  problem.q_values = floats(q_values);
  problem.bootstrap = floats(bootstrap);
  problem.invalid = bytes(invalid);
  problem.valid = bytes(valid);
  problem.gamma = gamma;
  problem.policy = Decay::of(gamma, lam);
  problem.value = Decay::of(gamma, lam_v);
  problem.two = lam != lam_v;
  problem.invalid_penalty = invalid_penalty;
  return run(cpu::select_loops().turns, problem, rewards, cu_turns);
}

Outputs token_gae(const Tensor& rewards, const Tensor& values, const OptionalTensor& bootstrap, const Tensor& action_mask, const Tensor& cu_tokens,
                  double gamma, double lam, double lam_v) {
  check_inputs(rewards, values, std::nullopt, bootstrap, cu_tokens);
  check_flags("action_mask", action_mask, rewards);
  cpu::Problem problem{};
  problem.rewards = floats(rewards);
  problem.values = floats(values);
  problem.bootstrap = floats(bootstrap);
  problem.actions = bytes(action_mask);
  problem.gamma = gamma;
  problem.policy = Decay::of(gamma, lam);
  problem.value = Decay::of(gamma, lam_v);
  problem.two = lam != lam_v;
  return run(cpu::select_loops().tokens, problem, rewards, cu_tokens);
}

Tensor normalize(const Tensor& advantages, const Tensor& moments, const OptionalTensor& invalid, const OptionalTensor& valid, double invalid_penalty,
                 double eps, double min_std) {
  check_vector("advantages", advantages, ScalarType::Float, advantages.numel(), advantages);
  check_vector("moments", moments, ScalarType::Double, 4, advantages);
  check_flags("invalid", invalid, advantages);
  check_flags("valid", valid, advantages);
  const double* m = doubles(moments);
  const auto scaled = Normalizer::of({m[0], m[1], m[2], m[3]}, eps, min_std);
  Tensor out = torch::stable::empty_like(advantages);
  const float* from = floats(advantages);
  const uint8_t *is_invalid = bytes(invalid), *is_valid = bytes(valid);
  float* to = writable(out);
  torch::stable::parallel_for(0, advantages.numel(), kTurnsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const double penalty = is_invalid && is_invalid[t] ? invalid_penalty : 0.0;
      to[t] = is_valid && !is_valid[t] ? 0.0f : static_cast<float>(scaled(from[t] - penalty));
    }
  });
  return out;
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
}

STABLE_TORCH_LIBRARY_IMPL(sapo_fast, CPU, library) {
  library.impl("turn_gae", TORCH_BOX(&turn_gae));
  library.impl("token_gae", TORCH_BOX(&token_gae));
  library.impl("normalize", TORCH_BOX(&normalize));
}

}  // namespace sapo

extern "C" __attribute__((visibility("default"))) int sapo_fast_interface() { return SAPO_INTERFACE_VERSION; }
