#include "rows.h"

namespace sapo::cpu {

namespace baseline {
extern const RowLoops row_loops[3];
}
#if defined(SAPO_HAVE_AVX2)
namespace avx2 {
extern const RowLoops row_loops[3];
}
#endif
#if defined(SAPO_HAVE_AVX512)
namespace avx512 {
extern const RowLoops row_loops[3];
}
#endif

const RowLoops& select_row_loops(Type type) {
  static const RowLoops* const best = [] {
#if defined(SAPO_HAVE_AVX512)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      return avx512::row_loops;
    }
#endif
#if defined(SAPO_HAVE_AVX2)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return avx2::row_loops;
#endif
    return baseline::row_loops;
  }();
  return best[static_cast<int>(type)];
}

}  // namespace sapo::cpu
