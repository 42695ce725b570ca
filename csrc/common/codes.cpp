#include <pybind11/pybind11.h>

#include "endpoint_segments/scan.h"
#include "group_advantages/statistics.h"
#include "policy_loss/plan.h"
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

// Names of modes, coefficients, metrics and enumerators in the kernels' order, and limits, by op. A test compares them
// with the Python configs.
pybind11::dict kernel_codes() {
  pybind11::dict advantages = settings_names<AdvantagePlan>(), loss = settings_names<PolicyPlan>();
  pybind11::dict similarity = settings_names<SimilaritySettings>(), segments = settings_names<SegmentSettings>();
  pybind11::dict token_advantages = settings_names<TokenAdvantageSettings>(), logprobs;
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
  similarity["max_rows"] = kMaxItems;
  logprobs["ignored_target"] = kIgnoredTarget;
  pybind11::dict codes;
  codes["group_advantages"] = advantages;
  codes["policy_loss"] = loss;
  codes["similarity_groups"] = similarity;
  codes["endpoint_segments"] = segments;
  codes["token_advantages"] = token_advantages;
  codes["token_logprobs"] = logprobs;
  return codes;
}

}  // namespace

// Built in a checkout alone: a wheel without it serves every version of Python.
PYBIND11_MODULE(_codes, module) { module.def("kernel_codes", kernel_codes); }
