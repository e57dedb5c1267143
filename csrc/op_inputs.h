// Checks and output allocation shared by the CPU and the CUDA operators. Callers in Python have checked already, with friendlier words; these keep a
// direct call of torch.ops.sapo_fast.* from reading out of bounds.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <array>
#include <optional>
#include <tuple>

#include "core/problem.h"

namespace sapo {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // advantages, v_targets, q_targets, moments (the last two empty where not wanted)

inline void check_vector(const char* name, const Tensor& x, ScalarType type, int64_t length, const Tensor& like) {
  STD_TORCH_CHECK(x.dim() == 1 && x.size(0) == length, name, " must have shape [", length, "]");
  STD_TORCH_CHECK(x.scalar_type() == type, name, " has the wrong dtype");
  STD_TORCH_CHECK(x.is_contiguous(), name, " must be contiguous");
  STD_TORCH_CHECK(x.is_cuda() == like.is_cuda() && x.get_device_index() == like.get_device_index(), name, " is on another device than rewards");
}

inline void check_flags(const char* name, const OptionalTensor& flags, const Tensor& like) {
  if (flags) check_vector(name, *flags, ScalarType::Bool, like.numel(), like);
}

inline void check_inputs(const Tensor& rewards, const Tensor& values, const OptionalTensor& q_values, const OptionalTensor& bootstrap,
                         const Tensor& offsets) {
  const int64_t total = rewards.numel();
  check_vector("rewards", rewards, ScalarType::Float, total, rewards);
  check_vector("values", values, ScalarType::Float, total, rewards);
  if (q_values) check_vector("q_values", *q_values, ScalarType::Float, total, rewards);
  STD_TORCH_CHECK(offsets.numel() >= 1, "offsets must have at least one entry");
  const ScalarType wide = offsets.scalar_type() == ScalarType::Int ? ScalarType::Int : ScalarType::Long;
  check_vector("offsets", offsets, wide, offsets.numel(), rewards);
  STD_TORCH_CHECK(total == 0 || offsets.numel() > 1, "offsets name no trajectory, but there are ", total, " turns");
  if (bootstrap) check_vector("bootstrap", *bootstrap, ScalarType::Float, offsets.numel() - 1, rewards);
}

inline const float* floats(const Tensor& x) { return static_cast<const float*>(x.const_data_ptr()); }
inline const float* floats(const OptionalTensor& x) { return x ? floats(*x) : nullptr; }
inline const uint8_t* bytes(const Tensor& x) { return static_cast<const uint8_t*>(x.const_data_ptr()); }
inline const uint8_t* bytes(const OptionalTensor& x) { return x ? bytes(*x) : nullptr; }
inline const double* doubles(const Tensor& x) { return static_cast<const double*>(x.const_data_ptr()); }

template <class T>
T* writable(const Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}

// A checked problem and the tensors that hold its results.
struct Call {
  Problem problem;
  Outputs outputs;
};

inline Call make_call(const Tensor& rewards, const Tensor& values, const OptionalTensor& q_values, const OptionalTensor& bootstrap,
                      const Tensor& offsets, double gamma, double lam, double lam_v, bool check, bool moments) {
  check_inputs(rewards, values, q_values, bootstrap, offsets);
  const std::array<int64_t, 1> total = {rewards.numel()}, none = {0}, four = {4};
  Call call{{},
            {torch::stable::empty_like(rewards), torch::stable::empty_like(rewards), torch::stable::new_empty(rewards, q_values ? total : none),
             torch::stable::new_empty(rewards, moments ? four : none, ScalarType::Double)}};
  Problem& p = call.problem;
  p.total = rewards.numel();
  p.trajectories = offsets.numel() - 1;
  p.offsets = {offsets.const_data_ptr(), offsets.scalar_type() == ScalarType::Long};
  p.rewards = floats(rewards);
  p.values = floats(values);
  p.q_values = floats(q_values);
  p.bootstrap = floats(bootstrap);
  p.advantages = writable<float>(std::get<0>(call.outputs));
  p.v_targets = writable<float>(std::get<1>(call.outputs));
  p.q_targets = writable<float>(std::get<2>(call.outputs));
  p.moments = moments ? writable<double>(std::get<3>(call.outputs)) : nullptr;
  p.gamma = gamma;
  p.policy = Decay::of(gamma, lam);
  p.value = Decay::of(gamma, lam_v);
  p.check = check;
  return call;
}

inline Call turn_call(const Tensor& rewards, const Tensor& values, const OptionalTensor& q_values, const OptionalTensor& bootstrap,
                      const OptionalTensor& invalid, const OptionalTensor& valid, const Tensor& cu_turns, double gamma, double lam, double lam_v,
                      double invalid_penalty, bool check, bool moments) {
  Call call = make_call(rewards, values, q_values, bootstrap, cu_turns, gamma, lam, lam_v, check, moments);
  check_flags("invalid", invalid, rewards);
  check_flags("valid", valid, rewards);
  call.problem.invalid = bytes(invalid);
  call.problem.valid = bytes(valid);
  call.problem.invalid_penalty = invalid_penalty;
  return call;
}

inline Call token_call(const Tensor& rewards, const Tensor& values, const OptionalTensor& bootstrap, const Tensor& action_mask,
                       const Tensor& cu_tokens, double gamma, double lam, double lam_v, bool check, bool moments) {
  Call call = make_call(rewards, values, std::nullopt, bootstrap, cu_tokens, gamma, lam, lam_v, check, moments);
  check_flags("action_mask", action_mask, rewards);
  call.problem.actions = bytes(action_mask);
  return call;
}

inline Scaling scaling_call(const Tensor& advantages, const Tensor& moments, const OptionalTensor& invalid, const OptionalTensor& valid,
                            double invalid_penalty, double eps, double min_std, const Tensor& out) {
  check_vector("advantages", advantages, ScalarType::Float, advantages.numel(), advantages);
  check_vector("moments", moments, ScalarType::Double, 4, advantages);
  check_flags("invalid", invalid, advantages);
  check_flags("valid", valid, advantages);
  return {advantages.numel(), floats(advantages), doubles(moments), bytes(invalid), bytes(valid), writable<float>(out), invalid_penalty, eps, min_std};
}

}  // namespace sapo
