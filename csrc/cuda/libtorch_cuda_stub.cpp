// Stands in for libtorch_cuda.so at link time where torch is a CPU build: the one function taken from it. Never installed; at run time the library of that
// name which a CUDA torch has already loaded provides it.
#include <cstdint>

extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t, void**) { return 1; }
