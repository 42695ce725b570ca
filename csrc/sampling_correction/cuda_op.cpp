#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "common/cuda/torch_stream.h"
#include "common/op_namespace.h"
#include "sampling_correction/cuda.h"
#include "sampling_correction/tensors.h"

namespace grpo_kernels {

CorrectionTensors sampling_correction_cuda(Tensor old_logprobs, Tensor sampling_logprobs, std::optional<Tensor> mask,
                                           std::optional<Tensor> cu_seqlens, std::optional<Tensor> m2_ceiling,
                                           std::vector<int64_t> statistics, std::vector<double> bounds,
                                           std::vector<int64_t> modes, std::vector<double> coefficients) {
  const DeviceGuard guard(old_logprobs.get_device_index());
  const CorrectionCall call = correction_call(old_logprobs, sampling_logprobs, mask, cu_seqlens, m2_ceiling,
                                              correction_plan(statistics, bounds, modes, coefficients));
  void* stream = current_stream(old_logprobs.get_device_index());
  if (call.is_double()) {
    launch_sampling_correction(call.batch<double>(), stream);
  } else {
    launch_sampling_correction(call.batch<float>(), stream);
  }
  return call.tensors();
}

}  // namespace grpo_kernels

STABLE_TORCH_LIBRARY_IMPL(GRPO_NAMESPACE, GRPO_CUDA_DEVICE, library) {
  library.impl("_sampling_correction_cuda", TORCH_BOX(&grpo_kernels::sampling_correction_cuda));
}
