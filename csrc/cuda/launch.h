// What the operators call; free of CUDA headers, so that nvcc never reads torch's and g++ never reads CUDA's.
#pragma once

#include <cstdint>

#include "core/problem.h"

namespace sapo::cuda {

// Device memory that one `launch` needs; it need not be cleared.
int64_t workspace_bytes(const Problem& problem);

// Put the work on `stream` (a cudaStream_t) of the current device and return. The result is null, or what CUDA says went wrong.
const char* launch(const Problem& problem, void* workspace, void* stream);
const char* launch(const Scaling& scaling, void* stream);

}  // namespace sapo::cuda
