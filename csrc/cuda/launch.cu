#include "launch.h"

#include "gae.cuh"

namespace sapo::cuda {
namespace {

// 8 warps x 2 windows of 32: tiles of 512 turns; 32 tiles a group.
using Launched = Sizes<8, 2, 32>;

// Lanes a short trajectory gets. The host knows the mean length without asking the device.
int width_for(const Problem& p) { return p.total <= 12 * p.trajectories ? 8 : 32; }

template <bool kTokens, bool kTwo, int kWidth>
void start(const Problem& p, const Workspace& w, cudaStream_t stream) {
  gae_kernel<Launched, kTokens, kTwo, kWidth><<<static_cast<unsigned>(w.blocks()), Launched::kThreads, 0, stream>>>(p, w);
}

const char* message(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

}  // namespace

int64_t workspace_bytes(const Problem& p) { return Plan<Launched>(p.total, p.trajectories, width_for(p)).bytes(); }

const char* launch(const Problem& p, void* workspace, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const int width = width_for(p);
  const Plan<Launched> plan(p.total, p.trajectories, width);
  if (const char* error = message(cudaMemsetAsync(workspace, 0, plan.zeroed_bytes(), stream))) return error;
  using Start = void (*)(const Problem&, const Workspace&, cudaStream_t);
  static constexpr Start starts[2][2][2] = {{{start<false, false, 8>, start<false, false, 32>}, {start<false, true, 8>, start<false, true, 32>}},
                                            {{start<true, false, 8>, start<true, false, 32>}, {start<true, true, 8>, start<true, true, 32>}}};
  starts[p.actions != nullptr][p.two()][width == 32](p, plan.carve(workspace), stream);
  return message(cudaGetLastError());
}

const char* launch(const Scaling& scaling, void* stream_handle) {
  if (scaling.total == 0) return nullptr;
  const int64_t blocks = (scaling.total + 255) / 256;
  normalize_kernel<<<static_cast<unsigned>(blocks < 4096 ? blocks : 4096), 256, 0, static_cast<cudaStream_t>(stream_handle)>>>(scaling);
  return message(cudaGetLastError());
}

}  // namespace sapo::cuda
