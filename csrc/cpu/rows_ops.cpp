// torch.ops.sapo_fast.row_*: the row pass on the CPU. Callers in Python have checked already, with friendlier words; the checks here keep a direct call from
// reading or writing out of bounds, and refuse before anything is written.
#include <algorithm>
#include <vector>

#include "op_inputs.h"
#include "rows.h"

namespace sapo {
namespace {

using cpu::RowProblem;
using cpu::Type;

Type type_of(const Tensor& logits) {
  switch (logits.scalar_type()) {
    case ScalarType::Float:
      return Type::kFloat;
    case ScalarType::BFloat16:
      return Type::kBFloat16;
    case ScalarType::Half:
      return Type::kHalf;
    default:
      STD_TORCH_CHECK(false, "logits must be float32, bfloat16 or float16");
  }
}

void check_rows_of(const char* name, const Tensor& x) {
  STD_TORCH_CHECK(!x.is_cuda() && x.dim() == 2, name, " must be a matrix on the CPU");
  STD_TORCH_CHECK(x.size(1) <= 1 || x.stride(1) == 1, name, " must be contiguous in its last dimension");
}

void check_column(const char* name, const Tensor& x, ScalarType type, int64_t length) {
  STD_TORCH_CHECK(!x.is_cuda() && x.dim() == 1 && x.size(0) == length, name, " must have shape [", length, "] on the CPU");
  STD_TORCH_CHECK(x.scalar_type() == type && (length <= 1 || x.stride(0) == 1), name, " has the wrong dtype or is not contiguous");
}

const float* column(const char* name, const OptionalTensor& x, int64_t length) {
  if (!x) return nullptr;
  check_column(name, *x, ScalarType::Float, length);
  return floats(*x);
}

// A checked problem, and which row of the logits each distinct row of it is.
struct Call {
  RowProblem problem{};
  std::vector<int64_t> next;
  std::vector<int64_t> row, first;  // [distinct]; empty where action i is on row i
};

// Actions on the same row become one chain, in their order.
void chain(Call& call, const int64_t* rows, int64_t n, int64_t total) {
  std::vector<int64_t> last(total, -1);
  call.next.assign(n, -1);
  call.row.reserve(n);
  call.first.reserve(n);
  for (int64_t i = 0; i < n; ++i) {
    STD_TORCH_CHECK(0 <= rows[i] && rows[i] < total, "rows[", i, "] is out of range");
    int64_t& end = last[rows[i]];
    if (end < 0) {
      call.row.push_back(rows[i]);
      call.first.push_back(i);
    } else {
      call.next[end] = i;
    }
    end = i;
  }
  if (static_cast<int64_t>(call.row.size()) < n) call.problem.next = call.next.data();
}

Call make_rows(const Tensor& logits, const OptionalTensor& rows, const Tensor& actions, int64_t w_plus, int64_t w_minus, double temperature) {
  Call call;
  RowProblem& p = call.problem;
  p.type = type_of(logits);
  check_rows_of("logits", logits);
  p.n = actions.numel();
  p.vocabulary = logits.size(1);
  check_column("actions", actions, ScalarType::Long, p.n);
  STD_TORCH_CHECK(0 <= w_plus && w_plus < p.vocabulary && 0 <= w_minus && w_minus < p.vocabulary && w_plus != w_minus,
                  "w+ and w- must be two different columns");
  STD_TORCH_CHECK(temperature > 0, "temperature must be > 0");
  p.logits = logits.const_data_ptr();
  p.stride = logits.stride(0);
  p.actions = static_cast<const int64_t*>(actions.const_data_ptr());
  p.low = std::min(w_plus, w_minus);
  p.high = std::max(w_plus, w_minus);
  p.temperature = static_cast<float>(temperature);
  for (int64_t i = 0; i < p.n; ++i) STD_TORCH_CHECK(0 <= p.actions[i] && p.actions[i] < p.vocabulary, "actions[", i, "] is out of range");
  if (rows) {
    check_column("rows", *rows, ScalarType::Long, p.n);
    chain(call, static_cast<const int64_t*>(rows->const_data_ptr()), p.n, logits.size(0));
  } else {
    STD_TORCH_CHECK(p.n == logits.size(0), "without rows, there must be one action per row of logits");
  }
  return call;
}

void set_out(RowProblem& p, const Tensor& logits, const Tensor& out) {
  check_rows_of("out", out);
  STD_TORCH_CHECK(out.scalar_type() == logits.scalar_type() && out.size(0) == logits.size(0) && out.size(1) == logits.size(1),
                  "out must have the shape and dtype of logits");
  STD_TORCH_CHECK(out.size(0) <= 1 || out.stride(0) >= out.size(1), "rows of out must not overlap");
  p.out = out.mutable_data_ptr();
  p.out_stride = out.stride(0);
}

// Rows are shared out to threads whole, so no bit depends on how many there are.
void run(const Call& call, cpu::RowLoop loop) {
  const bool all = call.first.empty();
  torch::stable::parallel_for(0, all ? call.problem.n : static_cast<int64_t>(call.first.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) loop(call.problem, all ? i : call.row[i], all ? i : call.first[i]);
  });
}

Tensor new_stats(RowProblem& p, const Tensor& logits) {
  const std::array<int64_t, 2> shape = {4, p.n};
  Tensor stats = torch::stable::new_empty(logits, shape, ScalarType::Float);
  p.stats = writable<float>(stats);
  return stats;
}

Tensor row_stats(const Tensor& logits, const OptionalTensor& rows, const Tensor& actions, int64_t w_plus, int64_t w_minus, double temperature) {
  Call call = make_rows(logits, rows, actions, w_plus, w_minus, temperature);
  Tensor stats = new_stats(call.problem, logits);
  run(call, cpu::select_row_loops(call.problem.type).stats);
  return stats;
}

Tensor row_loss(const Tensor& logits, const OptionalTensor& rows, const Tensor& actions, const OptionalTensor& old_logprobs, const Tensor& advantages,
                const OptionalTensor& weights, const OptionalTensor& ref_logprobs, const Tensor& scale, int64_t w_plus, int64_t w_minus,
                double temperature, double low, double high, double dual, double kl_coef, double entropy_coef, Tensor out) {
  Call call = make_rows(logits, rows, actions, w_plus, w_minus, temperature);
  RowProblem& p = call.problem;
  p.tokens = {column("old_logprobs", old_logprobs, p.n), column("advantages", advantages, p.n), column("weights", weights, p.n),
              column("ref_logprobs", ref_logprobs, p.n)};
  p.loss = {static_cast<float>(low), static_cast<float>(high), static_cast<float>(dual), static_cast<float>(kl_coef), entropy_coef};
  STD_TORCH_CHECK(!scale.is_cuda() && scale.numel() == 1 && scale.scalar_type() == ScalarType::Double, "scale must be a float64 scalar on the CPU");
  p.scale = *doubles(scale);
  set_out(p, logits, out);
  Tensor stats = new_stats(p, logits);
  run(call, cpu::select_row_loops(p.type).loss_grad);
  return stats;
}

void row_grad(const Tensor& logits, const OptionalTensor& rows, const Tensor& actions, const Tensor& stats, const Tensor& a, const OptionalTensor& b,
              int64_t w_plus, int64_t w_minus, double temperature, Tensor out) {
  Call call = make_rows(logits, rows, actions, w_plus, w_minus, temperature);
  RowProblem& p = call.problem;
  STD_TORCH_CHECK(!stats.is_cuda() && stats.dim() == 2 && stats.size(0) == 4 && stats.size(1) == p.n && stats.is_contiguous() &&
                      stats.scalar_type() == ScalarType::Float,
                  "stats must be [4, n] float32, contiguous");
  p.stats = writable<float>(stats);  // read only
  p.a = column("a", a, p.n);
  p.b = column("b", b, p.n);
  set_out(p, logits, out);
  run(call, cpu::select_row_loops(p.type).grad);
}

// Zero in the rows that `rows` leave out.
void clear_other_rows(const Tensor& rows, Tensor out) {
  check_rows_of("out", out);
  const int64_t total = out.size(0), n = rows.numel();
  check_column("rows", rows, ScalarType::Long, n);
  std::vector<bool> used(total, false);
  const int64_t* row = static_cast<const int64_t*>(rows.const_data_ptr());
  for (int64_t i = 0; i < n; ++i) {
    STD_TORCH_CHECK(0 <= row[i] && row[i] < total, "rows[", i, "] is out of range");
    used[row[i]] = true;
  }
  const int64_t size = type_of(out) == Type::kFloat ? 4 : 2, length = size * out.size(1), stride = size * out.stride(0);
  char* data = static_cast<char*>(out.mutable_data_ptr());
  torch::stable::parallel_for(0, total, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (!used[i]) std::fill_n(data + i * stride, length, 0);
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sapo_fast, library) {
  library.def("row_stats(Tensor logits, Tensor? rows, Tensor actions, int w_plus, int w_minus, float temperature) -> Tensor");
  library.def(
      "row_loss(Tensor logits, Tensor? rows, Tensor actions, Tensor? old_logprobs, Tensor advantages, Tensor? weights, Tensor? ref_logprobs, "
      "Tensor scale, int w_plus, int w_minus, float temperature, float low, float high, float dual, float kl_coef, float entropy_coef, "
      "Tensor(a!) out) -> Tensor");
  library.def(
      "row_grad(Tensor logits, Tensor? rows, Tensor actions, Tensor stats, Tensor a, Tensor? b, int w_plus, int w_minus, float temperature, "
      "Tensor(a!) out) -> ()");
  library.def("clear_other_rows(Tensor rows, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sapo_fast, CPU, library) {
  library.impl("row_stats", TORCH_BOX(&row_stats));
  library.impl("row_loss", TORCH_BOX(&row_loss));
  library.impl("row_grad", TORCH_BOX(&row_grad));
  library.impl("clear_other_rows", TORCH_BOX(&clear_other_rows));
}

}  // namespace sapo
