#include "rows.cuh"

#include <limits>

namespace sapo::cuda {
namespace {

// Vectors of 16 bytes a thread holds of a row: 32 registers.
constexpr int kVectors = 8;
constexpr int kStreamThreads = 512;

const char* message(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

// Runs `f` with the type of the logits.
template <class F>
const char* with_type(Type type, F f) {
  switch (type) {
    case Type::float32: return f(Float32{});
    case Type::float16: return f(Float16{});
    default: return f(BFloat16{});
  }
}

// Blocks the device lets a cluster have; 1 where it knows no clusters.
const char* most_cluster(int& most) {
  int device = 0, major = 0;
  if (const char* error = message(cudaGetDevice(&device))) return error;
  if (const char* error = message(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device))) return error;
  most = major >= 9 ? kMostCluster : 1;
  return nullptr;
}

template <class D, bool kStats, bool kGrad>
const char* start_stream(const RowsProblem& p, cudaStream_t stream) {
  stream_kernel<D, kStats, kGrad><<<static_cast<unsigned>(p.count), kStreamThreads, 0, stream>>>(p);
  return message(cudaGetLastError());
}

template <class D>
const char* start_resident(const RowsProblem& p, ResidentPlan plan, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(p.count * plan.cluster), threads = static_cast<unsigned>(plan.threads);
  if (plan.cluster == 1) {
    resident_kernel<D, kVectors, false><<<blocks, threads, 0, stream>>>(p, 1);
    return message(cudaGetLastError());
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(plan.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return message(cudaLaunchKernelEx(&config, resident_kernel<D, kVectors, true>, p, plan.cluster));
}

// What a grid can hold.
const char* too_many(int64_t blocks) { return blocks > std::numeric_limits<int>::max() ? "too many rows in one call" : nullptr; }

}  // namespace

const char* rows_stats(const RowsProblem& p, void* stream) {
  if (p.count == 0) return nullptr;
  if (const char* error = too_many(p.count)) return error;
  return with_type(p.type, [&](auto d) { return start_stream<decltype(d), true, false>(p, static_cast<cudaStream_t>(stream)); });
}

const char* rows_grad(const RowsProblem& p, void* stream_handle) {
  if (p.count == 0) return nullptr;
  if (const char* error = too_many(p.count)) return error;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  return with_type(p.type, [&](auto d) -> const char* {
    if (const char* error = start_stream<decltype(d), false, true>(p, stream)) return error;
    if (!p.first) return nullptr;
    actions_kernel<decltype(d)><<<static_cast<unsigned>((p.count + 255) / 256), 256, 0, stream>>>(p);
    return message(cudaGetLastError());
  });
}

const char* rows_loss_grad(const RowsProblem& p, void* stream_handle) {
  if (p.count == 0) return nullptr;
  if (const char* error = too_many(p.count * kMostCluster)) return error;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  int most = 1;
  if (const char* error = most_cluster(most)) return error;
  return with_type(p.type, [&](auto d) {
    using D = decltype(d);
    const ResidentPlan plan((int64_t{p.width} + 2 * D::kLanes - 2) / D::kLanes, kVectors, most);
    return plan.cluster ? start_resident<D>(p, plan, stream) : start_stream<D, true, true>(p, stream);
  });
}

const char* rows_scale(Type type, Matrix x, int64_t height, int width, const double* factor, void* stream) {
  if (height == 0 || width == 0) return nullptr;
  if (const char* error = too_many(height)) return error;
  return with_type(type, [&](auto d) {
    scale_kernel<decltype(d)><<<static_cast<unsigned>(height), 256, 0, static_cast<cudaStream_t>(stream)>>>(x, width, factor);
    return message(cudaGetLastError());
  });
}

}  // namespace sapo::cuda
