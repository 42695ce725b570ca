#pragma once

#include "sampling_correction/batch.h"

// correct_row    measures a row, writes its weights, mask and record
#define GRPO_DECLARE(level)                                            \
  namespace grpo_kernels::level {                                      \
  void correct_row(const CorrectionBatch<float>& batch, int64_t row);  \
  void correct_row(const CorrectionBatch<double>& batch, int64_t row); \
  }
GRPO_DECLARE(baseline)
GRPO_DECLARE(avx2)
GRPO_DECLARE(avx512)
#undef GRPO_DECLARE
