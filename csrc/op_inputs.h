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

namespace sapo {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // advantages, v_targets, q_targets (empty without Q), moments

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
  if (bootstrap) check_vector("bootstrap", *bootstrap, ScalarType::Float, offsets.numel() - 1, rewards);
}

inline Outputs make_outputs(const Tensor& rewards, bool with_q) {
  const std::array<int64_t, 1> total = {rewards.numel()}, none = {0}, four = {4};
  return {torch::stable::empty_like(rewards), torch::stable::empty_like(rewards), torch::stable::new_empty(rewards, with_q ? total : none),
          torch::stable::new_empty(rewards, four, ScalarType::Double)};
}

inline const float* floats(const Tensor& x) { return static_cast<const float*>(x.const_data_ptr()); }
inline const float* floats(const OptionalTensor& x) { return x ? floats(*x) : nullptr; }
inline const uint8_t* bytes(const Tensor& x) { return static_cast<const uint8_t*>(x.const_data_ptr()); }
inline const uint8_t* bytes(const OptionalTensor& x) { return x ? bytes(*x) : nullptr; }
inline const double* doubles(const Tensor& x) { return static_cast<const double*>(x.const_data_ptr()); }
inline float* writable(const Tensor& x) { return static_cast<float*>(x.mutable_data_ptr()); }

}  // namespace sapo
