#pragma once

#include "sampling_correction/batch.h"

namespace grpo_kernels {

template <typename T>
void launch_sampling_correction(const CorrectionBatch<T>& batch, void* stream);

}  // namespace grpo_kernels
