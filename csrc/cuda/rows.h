// The row pass on the GPU, as the operators see it; free of CUDA headers.
#pragma once

#include "core/ppo.h"
#include "core/row_stats.h"

namespace sapo::cuda {

enum class Type { float32, float16, bfloat16 };

// [height, width] in device memory, strides in elements. Any strides; 16-byte accesses need columns side by side.
struct Matrix {
  void* data;
  int64_t row_stride, column_stride;
};

// n tokens, each on one row of the logits [height, width]. Pointers that a call does not need are null.
struct RowsProblem {
  Type type;
  int64_t count;   // n
  int64_t height;  // T
  int width;       // V
  Matrix logits;
  Matrix out;            // of the gradient; may be the same memory, element for element
  const int64_t* rows;     // [n] null: token i is on row i
  const int64_t* actions;  // [n]
  int plus, minus;         // w+, w-: never read as logits, 0 in the gradient
  float temperature;
  float *logprob, *top, *log_sum, *spread;  // [n] statistics: `stats` and `loss_grad` write them, `grad` reads them

  // grad: slopes of every token. Where rows repeat: of the whole row, with the first token on it, and of the row's tokens with this action.
  const float *a, *b;    // [n] b null: no entropy term
  const float* same;     // [n] null: no row repeats
  const int64_t* first;  // [n] null: no row repeats

  // loss_grad: slopes from the statistics. No row may repeat.
  TokenInputs<float> tokens;
  PolicyLoss<float> loss;
  const double* scale;  // [1] the gradient's scale / number of tokens
};

// All put the work on `stream` (a cudaStream_t) of the current device and return; the result is null, or what CUDA says went wrong.
// A row outside [0, height) is left out, an action outside [0, width) has log-prob NaN: no access out of bounds.
const char* rows_stats(const RowsProblem& problem, void* stream);
const char* rows_grad(const RowsProblem& problem, void* stream);
const char* rows_loss_grad(const RowsProblem& problem, void* stream);

// x *= *factor; not touched where the factor is 1.
const char* rows_scale(Type type, Matrix x, int64_t height, int width, const double* factor, void* stream);

}  // namespace sapo::cuda
