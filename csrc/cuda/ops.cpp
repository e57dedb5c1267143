// The CUDA kernels of torch.ops.sapo_fast.*; their schemas are in the CPU library, which is loaded first.
#define USE_CUDA  // the stream's getter is declared only then
#include "op_inputs.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "interface.h"
#include "launch.h"

namespace sapo {
namespace {

void* stream_of(const Tensor& x) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return stream;
}

void check_launch(const char* error) { STD_TORCH_CHECK(error == nullptr, "CUDA: ", error); }

Outputs run(const Tensor& rewards, const Call& call) {
  const std::array<int64_t, 1> bytes = {cuda::workspace_bytes(call.problem)};
  const Tensor workspace = torch::stable::new_empty(rewards, bytes, ScalarType::Byte);
  check_launch(cuda::launch(call.problem, workspace.mutable_data_ptr(), stream_of(rewards)));
  return call.outputs;
}

Outputs turn_gae(const Tensor& rewards, const Tensor& values, const OptionalTensor& q_values, const OptionalTensor& bootstrap,
                 const OptionalTensor& invalid, const OptionalTensor& valid, const Tensor& cu_turns, double gamma, double lam, double lam_v,
                 double invalid_penalty, bool check, bool moments) {
  const torch::stable::accelerator::DeviceGuard guard(rewards.get_device_index());
  return run(rewards, turn_call(rewards, values, q_values, bootstrap, invalid, valid, cu_turns, gamma, lam, lam_v, invalid_penalty, check, moments));
}

Outputs token_gae(const Tensor& rewards, const Tensor& values, const OptionalTensor& bootstrap, const Tensor& action_mask, const Tensor& cu_tokens,
                  double gamma, double lam, double lam_v, bool check, bool moments) {
  const torch::stable::accelerator::DeviceGuard guard(rewards.get_device_index());
  return run(rewards, token_call(rewards, values, bootstrap, action_mask, cu_tokens, gamma, lam, lam_v, check, moments));
}

Tensor normalize(const Tensor& advantages, const Tensor& moments, const OptionalTensor& invalid, const OptionalTensor& valid, double invalid_penalty,
                 double eps, double min_std) {
  const torch::stable::accelerator::DeviceGuard guard(advantages.get_device_index());
  Tensor out = torch::stable::empty_like(advantages);
  check_launch(cuda::launch(scaling_call(advantages, moments, invalid, valid, invalid_penalty, eps, min_std, out), stream_of(advantages)));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sapo_fast, CUDA, library) {
  library.impl("turn_gae", TORCH_BOX(&turn_gae));
  library.impl("token_gae", TORCH_BOX(&token_gae));
  library.impl("normalize", TORCH_BOX(&normalize));
}

}  // namespace sapo

extern "C" __attribute__((visibility("default"))) int sapo_fast_interface() { return SAPO_INTERFACE_VERSION; }
