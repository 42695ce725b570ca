#pragma once

#include "common/half_bits.h"
#include "token_logprobs/softmax.h"

// The divergence of a row of a student's logits from a teacher's row, and its gradient by the student's logits.
namespace grpo_kernels {

// Positions in KINDS of grpo_kernels/ops/linear_head/divergence.py.
enum class DivergenceKind : int64_t { kForward, kReverse, kJsd };

struct LogitRow {
  const float* logits;
  LogitMap<float> map;
  double normalizer;  // log-sum-exp of the mapped logits
};

struct DivergenceRow {
  LogitRow student, teacher;
  int64_t columns;
  DivergenceKind kind;
  float beta;
  double share;  // of the row in the loss, a factor of its gradient
};

}  // namespace grpo_kernels

// row_divergence     reads both rows once
// divergence_row_gradient
//                    writes the gradient, which may overwrite the student's logits, and returns the divergence
#define GRPO_DECLARE(level)                                                     \
  namespace grpo_kernels::level {                                               \
  double row_divergence(const DivergenceRow& row);                              \
  double divergence_row_gradient(const DivergenceRow& row, float* gradient);    \
  double divergence_row_gradient(const DivergenceRow& row, BFloat16* gradient); \
  }
GRPO_DECLARE(baseline)
GRPO_DECLARE(avx2)
GRPO_DECLARE(avx512)
#undef GRPO_DECLARE
