#pragma once

#include <math.h>
#include <stdint.h>

#include "grpo_kernels/silhouette.h"

// From the distances of a prompt's responses to their groups: the tree, the cut with the best silhouette, and what it
// means.
namespace grpo_kernels {

enum Verdict : uint8_t { kClustered, kAllSame, kAllDifferent, kSmall, kEmpty, kUnclear };
enum Collapse : int { kOne = 0, kSingletons = 1 };
enum RowStatus : uint8_t { kInUse = 0, kMasked = 1, kNotFinite = 2, kZeroVector = 4 };

// In the order of SimilarityConfig.modes and .coefficients.
struct SimilaritySettings {
  int linkage, k_min, k_max, collapse, different;
  double min_silhouette, tie_tolerance, distance_floor, different_at;
};

constexpr int kSimilarityModes = 5, kSimilarityCoefficients = 4;

GRPO_HD SimilaritySettings similarity_settings(const int64_t* modes, const double* coefficients) {
  return {static_cast<int>(modes[0]),
          static_cast<int>(modes[1]),
          static_cast<int>(modes[2]),
          static_cast<int>(modes[3]),
          static_cast<int>(modes[4]),
          coefficients[0],
          coefficients[1],
          coefficients[2],
          coefficients[3]};
}

// Which rows are whose: prompt p has the rows row(begin(p)) to row(begin(p + 1) - 1).
struct Prompts {
  int64_t count, size;     // size: that of each, or where they differ of the largest
  const int64_t* order;    // null: rows are in order
  const int64_t* offsets;  // null: all have `size` rows

  GRPO_HD int64_t begin(int64_t prompt) const { return offsets == nullptr ? prompt * size : offsets[prompt]; }
  GRPO_HD int rows(int64_t prompt) const { return static_cast<int>(begin(prompt + 1) - begin(prompt)); }
  GRPO_HD int64_t row(int64_t place) const { return order == nullptr ? place : order[place]; }
};

struct Grouping {
  int groups, best_k;
  double silhouette;
  uint8_t verdict;
};

// A row's squared norm says whether it can be used: it has to be a float32, as its terms are, and far enough from the
// smallest of them for its digits to be right.
constexpr double kMostNorm = 3.4028234663852886e38, kLeastNorm = 1e-30;

GRPO_HD uint8_t status_of(double norm) {
  return !(norm <= kMostNorm) ? kNotFinite : norm < kLeastNorm ? kZeroVector : kInUse;
}

// s = g_ij / sqrt(g_ii g_jj) in double, where equal rows give exactly 1. What is kept is a float.
GRPO_HD float cosine_distance(double product, double norm_i, double norm_j) {
  if (norm_i < kLeastNorm || norm_j < kLeastNorm) return 1;
  const double distance = 1 - product / sqrt(norm_i * norm_j);
  return static_cast<float>(distance < 0 ? 0 : distance > 2 ? 2 : distance);
}

// The last k that is tried; below k_min: none.
GRPO_HD int last_k(const SimilaritySettings& settings, int n) {
  return settings.k_max < n - 1 ? settings.k_max : n - 1;
}

// Of n items with these smallest and largest distances; scores[k] for k_min to last_k.
GRPO_HD Grouping choose_cut(const SimilaritySettings& settings, const double* scores, int n, double lowest,
                            double highest) {
  if (n < 3) return {n > 0, n > 0, 0, n > 0 ? kSmall : kEmpty};
  const int last = last_k(settings, n);
  int best_k = 1;
  double best = -1;
  for (int k = settings.k_min; k <= last; ++k) best = scores[k] > best ? scores[k] : best;
  for (int k = last; k >= settings.k_min; --k) {
    if (scores[k] >= best - settings.tie_tolerance) best_k = k;
  }
  const double silhouette = best_k == 1 ? 0 : scores[best_k];
  if (highest <= settings.distance_floor) return {1, best_k, silhouette, kAllSame};
  if (best_k > 1 && silhouette >= settings.min_silhouette) return {best_k, best_k, silhouette, kClustered};
  const bool different = lowest > settings.different_at;
  const int becomes = different ? settings.different : settings.collapse;
  return {becomes == kOne ? 1 : n, best_k, silhouette, different ? kAllDifferent : kUnclear};
}

// Labels in order of first appearance, as the clusters go by their first item. `root` is [n] of memory.
GRPO_HD void write_labels(const int32_t* merges, int n, int groups, int32_t* root, int32_t* labels) {
  for (int i = 0; i < n; ++i) root[i] = i;
  for (int m = 0; m < n - groups; ++m) root[merges[2 * m + 1]] = merges[2 * m];
  int count = 0;
  for (int i = 0; i < n; ++i) labels[i] = root[i] == i ? count++ : labels[root[i]];
}

}  // namespace grpo_kernels
