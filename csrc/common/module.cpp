#include <pthread.h>
#include <pybind11/pybind11.h>

#include <limits>
#include <utility>

#ifdef USE_CUDA
#include <cuda_runtime_api.h>
#endif

#include "build_facts.h"
#include "common/allocate.h"
#include "common/parallel.h"
#include "common/simd/levels.h"
#include "endpoint_segments/scan.h"
#include "group_advantages/statistics.h"
#include "policy_loss/plan.h"
#include "sampling_correction/plan.h"
#include "similarity_groups/rules.h"
#include "token_advantages/terms.h"
#include "token_logprobs/softmax.h"

namespace {

using namespace grpo_kernels;

template <typename Settings>
pybind11::dict settings_names() {
  pybind11::dict names;
  names["modes"] = Settings::kModeNames;
  names["coefficients"] = Settings::kCoefficientNames;
  return names;
}

// Names of modes, coefficients, metrics and enumerators in the kernels' order, and limits, by op: a test compares them
// with the Python configs.
pybind11::dict kernel_codes() {
  pybind11::dict advantages = settings_names<AdvantagePlan>(), loss = settings_names<PolicyPlan>();
  pybind11::dict similarity = settings_names<SimilaritySettings>(), segments = settings_names<SegmentSettings>();
  pybind11::dict token_advantages = settings_names<TokenAdvantageSettings>(), logprobs;
  pybind11::dict correction = settings_names<CorrectionSettings>();
#define GRPO_EXPORT(codes, Enum) codes[#Enum] = k##Enum##Names
  GRPO_EXPORT(advantages, Center);
  GRPO_EXPORT(advantages, Scale);
  GRPO_EXPORT(advantages, Singleton);
  GRPO_EXPORT(advantages, Combine);
  GRPO_EXPORT(advantages, Whiten);
  GRPO_EXPORT(advantages, Gain);
  GRPO_EXPORT(loss, Loss);
  GRPO_EXPORT(loss, Ratio);
  GRPO_EXPORT(loss, Kl);
  GRPO_EXPORT(loss, Aggregation);
  GRPO_EXPORT(loss, Correction);
  GRPO_EXPORT(correction, WeightLevel);
  GRPO_EXPORT(correction, Level);
  GRPO_EXPORT(correction, Estimator);
  GRPO_EXPORT(loss, Kind);
  GRPO_EXPORT(similarity, Linkage);
  GRPO_EXPORT(similarity, Collapse);
  GRPO_EXPORT(similarity, Verdict);
  GRPO_EXPORT(similarity, RowStatus);
  GRPO_EXPORT(segments, SegmentRule);
  GRPO_EXPORT(segments, SegmentProxy);
  GRPO_EXPORT(segments, SegmentCredit);
  GRPO_EXPORT(segments, SegmentNorm);
  GRPO_EXPORT(token_advantages, TokenWhiten);
#undef GRPO_EXPORT
  loss["metrics"] = kPolicyMetricNames;
  correction["row"] = kRowNames;
  correction["rejection"] = kRejectionNames;
  similarity["max_rows"] = kMaxItems;
  logprobs["ignored_target"] = kIgnoredTarget;
  pybind11::dict codes;
  codes["group_advantages"] = advantages;
  codes["policy_loss"] = loss;
  codes["sampling_correction"] = correction;
  codes["similarity_groups"] = similarity;
  codes["endpoint_segments"] = segments;
  codes["token_advantages"] = token_advantages;
  codes["token_logprobs"] = logprobs;
  return codes;
}

pybind11::dict build_facts() {
  pybind11::dict facts;
  facts["compiler"] = GRPO_COMPILER;
  facts["flags"] = GRPO_FLAGS;
  facts["torch_target"] = GRPO_TORCH_TARGET;
  facts["built_with_torch"] = GRPO_BUILT_WITH_TORCH;
  facts["simd_compiled"] = GRPO_SIMD_LEVELS;
  facts["simd_here"] = simd_name(simd_level());
  facts["cuda"] = GRPO_CUDA_VERSION;
  facts["cuda_architectures"] = GRPO_CUDA_ARCHITECTURES;
  return facts;
}

}  // namespace

// Importing the module runs the op registrations that are linked into it.
PYBIND11_MODULE(GRPO_MODULE_NAME, module) {
  module.def("poison_allocations", [](bool on) { poison_allocations = on; });
#ifndef USE_CUDA
  // For tests: sets the least work that is divided among threads and returns the last setting; how often work was.
  module.def("set_fork_nanoseconds", [](double nanoseconds) { return std::exchange(fork_nanoseconds, nanoseconds); });
  module.def("forks", [] { return forks.load(); });
  // The threads of the parent's pool do not exist in a forked child, where OpenMP would wait for them forever.
  pthread_atfork(nullptr, nullptr, [] { fork_nanoseconds = std::numeric_limits<double>::infinity(); });
#else
  // The newest CUDA that the driver supports, 13020 for 13.2; 0 without a driver.
  module.def("driver_version", [] {
    int version = 0;
    cudaDriverGetVersion(&version);
    return version;
  });
#endif
  module.def("build_facts", build_facts);
  module.def("kernel_codes", kernel_codes);
}
