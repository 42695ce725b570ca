#pragma once

#include <math.h>
#include <stdint.h>

#include "similarity_groups/silhouette.h"

// From the distances of a prompt's responses to their groups: the cut of the tree with the best silhouette, and the
// verdict on the prompt.
namespace grpo_kernels {

// In the order of the names in grpo_kernels/ops/similarity_groups (config.py and __init__.py); tests/test_codes.py
// compares them.
GRPO_CODES(Verdict, uint8_t, kClustered, kAllSame, kAllDifferent, kSmall, kEmpty, kUnclear);
GRPO_CODES(Collapse, int, kOne, kSingletons);
GRPO_CODES(RowStatus, uint8_t, kInUse = 0, kMasked = 1, kNotFinite = 2, kZeroVector = 4);

// In the order of SimilarityConfig.settings.
#define GRPO_SIMILARITY_SETTINGS(MODE, COEFFICIENT) \
  MODE(Linkage, linkage)                            \
  MODE(int, k_min)                                  \
  MODE(int, k_max)                                  \
  MODE(Collapse, collapse)                          \
  MODE(Collapse, different)                         \
  COEFFICIENT(min_silhouette)                       \
  COEFFICIENT(tie_tolerance)                        \
  COEFFICIENT(distance_floor)                       \
  COEFFICIENT(different_at)

struct SimilaritySettings {
  GRPO_SETTINGS(SimilaritySettings, GRPO_SIMILARITY_SETTINGS)
};

// The rows of each prompt: prompt p has the rows row(begin(p)) to row(begin(p + 1) - 1).
struct Prompts {
  int64_t count, size;     // size: rows of the largest prompt
  const int64_t* order;    // null: rows are in order
  const int64_t* offsets;  // null: every prompt has `size` rows

  GRPO_HD int64_t begin(int64_t prompt) const { return offsets == nullptr ? prompt * size : offsets[prompt]; }
  GRPO_HD int rows(int64_t prompt) const { return static_cast<int>(begin(prompt + 1) - begin(prompt)); }
  GRPO_HD int64_t row(int64_t position) const { return order == nullptr ? position : order[position]; }
};

struct Grouping {
  int groups, best_k;
  double silhouette;
  Verdict verdict;
};

// Squared norms are sums of float32 products: above the first limit they may overflow, below the second the products
// may be subnormal and lose digits.
constexpr double kMaxNorm = 3.4028234663852886e38, kMinNorm = 1e-30;

GRPO_HD RowStatus status_of(double norm) {
  if (!(norm <= kMaxNorm)) return RowStatus::kNotFinite;
  return norm < kMinNorm ? RowStatus::kZeroVector : RowStatus::kInUse;
}

// Limit of the rounding errors of inverse_length() and cosine_distance(), so that equal rows have distance 0.
constexpr double kCosineError = 1e-15;

// Zero vectors have none, which puts them at distance 1 from all others.
GRPO_HD double inverse_length(double norm) { return norm < kMinNorm ? 0 : 1 / sqrt(norm); }

// 1 - g_ij / sqrt(g_ii g_jj), with the same bits for j and i, in double before it is rounded.
GRPO_HD float cosine_distance(double product, double inverse_i, double inverse_j) {
  const double distance = 1 - product * (inverse_i * inverse_j);
  return static_cast<float>(distance < kCosineError ? 0 : distance > 2 ? 2 : distance);
}

// The largest k that is tried; below k_min, none is.
GRPO_HD int last_k(const SimilaritySettings& settings, int n) {
  return settings.k_max < n - 1 ? settings.k_max : n - 1;
}

// Chooses the cut for n items from scores[k], k_min to last_k, and their smallest and largest distances.
GRPO_HD Grouping choose_cut(const SimilaritySettings& settings, const double* scores, int n, double lowest,
                            double highest) {
  if (n < 3) return {n > 0, n > 0, 0, n > 0 ? Verdict::kSmall : Verdict::kEmpty};
  const int last = last_k(settings, n);
  int best_k = 1;
  double best = -1;
  for (int k = settings.k_min; k <= last; ++k) best = scores[k] > best ? scores[k] : best;
  for (int k = last; k >= settings.k_min; --k) {
    if (scores[k] >= best - settings.tie_tolerance) best_k = k;
  }
  const double silhouette = best_k == 1 ? 0 : scores[best_k];
  if (highest <= settings.distance_floor) return {1, best_k, silhouette, Verdict::kAllSame};
  if (best_k > 1 && silhouette >= settings.min_silhouette) return {best_k, best_k, silhouette, Verdict::kClustered};
  const bool is_different = lowest > settings.different_at;
  const Collapse collapse = is_different ? settings.different : settings.collapse;
  const Verdict verdict = is_different ? Verdict::kAllDifferent : Verdict::kUnclear;
  return {collapse == Collapse::kOne ? 1 : n, best_k, silhouette, verdict};
}

// Writes labels in order of first appearance, which is the order of the clusters' smallest items. `root` is [n] of
// working memory.
GRPO_HD void write_labels(const int32_t* merges, int n, int groups, int32_t* root, int32_t* labels) {
  for (int i = 0; i < n; ++i) root[i] = i;
  for (int m = 0; m < n - groups; ++m) root[merges[2 * m + 1]] = merges[2 * m];
  int count = 0;
  for (int i = 0; i < n; ++i) labels[i] = root[i] == i ? count++ : labels[root[i]];
}

}  // namespace grpo_kernels
