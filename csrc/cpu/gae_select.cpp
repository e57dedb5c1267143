#include "gae.h"

namespace sapo::cpu {

namespace baseline {
extern const Loops loops;
}
#if defined(SAPO_HAVE_AVX2)
namespace avx2 {
extern const Loops loops;
}
#endif

const Loops& select_loops() {
#if defined(SAPO_HAVE_AVX2)
  static const bool fast = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (fast) return avx2::loops;
#endif
  return baseline::loops;
}

}  // namespace sapo::cpu
