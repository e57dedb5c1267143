// torch.ops.sapo_fast.cuda_row_*: the row pass on CUDA tensors; schemas and kernels. Callers in Python have checked already, with friendlier words; the
// checks here refuse before anything is written. What only the device knows (rows, actions) the kernels guard.
#define USE_CUDA  // the stream's getter is declared only then
#include "op_inputs.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <limits>

#include "rows.h"

namespace sapo {
namespace {

using cuda::Matrix;
using cuda::RowsProblem;
using cuda::Type;

void* stream_of(const Tensor& x) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return stream;
}

void check_launch(const char* error) { STD_TORCH_CHECK(error == nullptr, "CUDA: ", error); }

Type type_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return Type::float32;
    case ScalarType::Half: return Type::float16;
    case ScalarType::BFloat16: return Type::bfloat16;
    default: STD_TORCH_CHECK(false, "logits must be float32, float16 or bfloat16");
  }
}

Matrix matrix_of(const char* name, const Tensor& x) {
  STD_TORCH_CHECK(x.is_cuda() && x.dim() == 2, name, " must be a matrix on a CUDA device");
  STD_TORCH_CHECK(x.size(1) < std::numeric_limits<int>::max() / 2, name, " is too wide");
  return {x.mutable_data_ptr(), x.stride(0), x.stride(1)};
}

// [n] of the type, side by side, on the device of `like`; null where there is none.
template <class T>
const T* column(const char* name, const OptionalTensor& x, ScalarType type, int64_t length, const Tensor& like) {
  if (!x) return nullptr;
  check_vector(name, *x, type, length, like);
  return static_cast<const T*>(x->const_data_ptr());
}

RowsProblem problem_of(const Tensor& logits, const OptionalTensor& rows, const Tensor& actions, int64_t plus, int64_t minus, double temperature) {
  RowsProblem p{};
  p.type = type_of(logits);
  p.logits = matrix_of("logits", logits);
  p.count = actions.numel();
  p.height = logits.size(0);
  p.width = static_cast<int>(logits.size(1));
  p.rows = column<int64_t>("rows", rows, ScalarType::Long, p.count, logits);
  STD_TORCH_CHECK(rows || p.count == p.height, "without rows, there must be one action per row of logits");
  p.actions = column<int64_t>("actions", actions, ScalarType::Long, p.count, logits);
  STD_TORCH_CHECK(0 <= plus && plus < p.width && 0 <= minus && minus < p.width && plus != minus, "w+ and w- must be two different columns");
  STD_TORCH_CHECK(temperature > 0, "temperature must be > 0");
  p.plus = static_cast<int>(plus);
  p.minus = static_cast<int>(minus);
  p.temperature = static_cast<float>(temperature);
  return p;
}

void set_out(RowsProblem& p, const Tensor& logits, const Tensor& out) {
  p.out = matrix_of("out", out);
  STD_TORCH_CHECK(out.scalar_type() == logits.scalar_type() && out.size(0) == logits.size(0) && out.size(1) == logits.size(1) &&
                      out.get_device_index() == logits.get_device_index(),
                  "out must have the shape, dtype and device of logits");
  STD_TORCH_CHECK((out.size(0) <= 1 || out.stride(0) != 0) && (out.size(1) <= 1 || out.stride(1) != 0), "entries of out must not share memory");
}

// [4, n]: log-prob, top, log_sum, spread.
void set_stats(RowsProblem& p, const Tensor& stats) {
  float* at = writable<float>(stats);
  p.logprob = at;
  p.top = at + p.count;
  p.log_sum = at + 2 * p.count;
  p.spread = at + 3 * p.count;
}

Tensor new_stats(RowsProblem& p, const Tensor& logits) {
  const std::array<int64_t, 2> shape = {4, p.count};
  Tensor stats = torch::stable::new_empty(logits, shape, ScalarType::Float);
  set_stats(p, stats);
  return stats;
}

const double* scalar(const char* name, const Tensor& x, const Tensor& like) {
  STD_TORCH_CHECK(x.is_cuda() && x.get_device_index() == like.get_device_index() && x.numel() == 1 && x.scalar_type() == ScalarType::Double, name,
                  " must be a float64 scalar on the device of the logits");
  return doubles(x);
}

Tensor row_stats(const Tensor& logits, const OptionalTensor& rows, const Tensor& actions, int64_t plus, int64_t minus, double temperature) {
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  RowsProblem p = problem_of(logits, rows, actions, plus, minus, temperature);
  Tensor stats = new_stats(p, logits);
  check_launch(cuda::rows_stats(p, stream_of(logits)));
  return stats;
}

Tensor row_loss(const Tensor& logits, const OptionalTensor& rows, const Tensor& actions, const OptionalTensor& old_logprobs, const Tensor& advantages,
                const OptionalTensor& weights, const OptionalTensor& ref_logprobs, const Tensor& scale, int64_t plus, int64_t minus, double temperature,
                double low, double high, double dual, double kl_coef, double entropy_coef, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  RowsProblem p = problem_of(logits, rows, actions, plus, minus, temperature);
  p.tokens = {column<float>("old_logprobs", old_logprobs, ScalarType::Float, p.count, logits),
              column<float>("advantages", advantages, ScalarType::Float, p.count, logits), column<float>("weights", weights, ScalarType::Float, p.count, logits),
              column<float>("ref_logprobs", ref_logprobs, ScalarType::Float, p.count, logits)};
  p.loss = {static_cast<float>(low), static_cast<float>(high), static_cast<float>(dual), static_cast<float>(kl_coef), entropy_coef};
  p.scale = scalar("scale", scale, logits);
  set_out(p, logits, out);
  Tensor stats = new_stats(p, logits);
  check_launch(cuda::rows_loss_grad(p, stream_of(logits)));
  return stats;
}

void row_grad(const Tensor& logits, const OptionalTensor& rows, const Tensor& actions, const Tensor& stats, const Tensor& a, const OptionalTensor& b,
              const OptionalTensor& same, const OptionalTensor& first, int64_t plus, int64_t minus, double temperature, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  RowsProblem p = problem_of(logits, rows, actions, plus, minus, temperature);
  STD_TORCH_CHECK(stats.dim() == 2 && stats.size(0) == 4 && stats.size(1) == p.count && stats.is_contiguous() && stats.is_cuda() &&
                      stats.get_device_index() == logits.get_device_index() && stats.scalar_type() == ScalarType::Float,
                  "stats must be [4, n] float32, contiguous, on the device of the logits");
  set_stats(p, stats);
  p.a = column<float>("a", a, ScalarType::Float, p.count, logits);
  p.b = column<float>("b", b, ScalarType::Float, p.count, logits);
  p.same = column<float>("same", same, ScalarType::Float, p.count, logits);
  p.first = column<int64_t>("first", first, ScalarType::Long, p.count, logits);
  set_out(p, logits, out);
  check_launch(cuda::rows_grad(p, stream_of(logits)));
}

void row_scale(Tensor x, const Tensor& factor) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Matrix matrix = matrix_of("x", x);
  check_launch(cuda::rows_scale(type_of(x), matrix, x.size(0), static_cast<int>(x.size(1)), scalar("factor", factor, x), stream_of(x)));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sapo_fast, library) {
  library.def("cuda_row_stats(Tensor logits, Tensor? rows, Tensor actions, int w_plus, int w_minus, float temperature) -> Tensor");
  library.def(
      "cuda_row_loss(Tensor logits, Tensor? rows, Tensor actions, Tensor? old_logprobs, Tensor advantages, Tensor? weights, Tensor? ref_logprobs, "
      "Tensor scale, int w_plus, int w_minus, float temperature, float low, float high, float dual, float kl_coef, float entropy_coef, "
      "Tensor(a!) out) -> Tensor");
  library.def(
      "cuda_row_grad(Tensor logits, Tensor? rows, Tensor actions, Tensor stats, Tensor a, Tensor? b, Tensor? same, Tensor? first, int w_plus, "
      "int w_minus, float temperature, Tensor(a!) out) -> ()");
  library.def("cuda_row_scale(Tensor(a!) x, Tensor factor) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sapo_fast, CUDA, library) {
  library.impl("cuda_row_stats", TORCH_BOX(&row_stats));
  library.impl("cuda_row_loss", TORCH_BOX(&row_loss));
  library.impl("cuda_row_grad", TORCH_BOX(&row_grad));
  library.impl("cuda_row_scale", TORCH_BOX(&row_scale));
}

}  // namespace sapo
