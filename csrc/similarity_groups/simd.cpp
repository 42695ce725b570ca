// Compiled once per instruction set (GRPO_SIMD). Use only C headers and always-inlined project functions here: the
// linker could merge an inline function of the standard library with a copy built for another instruction set.
#include "similarity_groups/simd.h"

#include "common/simd/half_lanes.h"
#include "similarity_groups/host_cuts.h"
#include "similarity_groups/host_tree.h"

namespace grpo_kernels::GRPO_SIMD {
namespace {

// Products are not rounded where the instruction set has fused multiply-add, so results differ in the last place
// between instruction sets with and without it.
GRPO_HD Floats multiply_add(const Floats& a, const Floats& b, const Floats& sum) {
#ifdef __FMA__
  return _mm256_fmadd_ps(a, b, sum);
#else
  return a * b + sum;
#endif
}

// Adds the upper four lanes to the lower four, in double. Through memory: GCC 12 extracts upper lanes one by one.
GRPO_HD Quad halve(const Floats& lanes) {
  float both[8];
  store_lanes(both, lanes);
  return load_quad(both) + load_quad(both + 4);
}

// Sums of the lanes of four vectors, each as (0 + 2) + (1 + 3).
GRPO_HD Quad sum_each(const Quad& a, const Quad& b, const Quad& c, const Quad& d) {
  const Quad ab = __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
  const Quad cd = __builtin_shufflevector(c, d, 0, 1, 4, 5) + __builtin_shufflevector(c, d, 2, 3, 6, 7);
  return __builtin_shufflevector(ab, cd, 0, 2, 4, 6) + __builtin_shufflevector(ab, cd, 1, 3, 5, 7);
}

// A tile of kUp x kAcross inner products: twelve sums and four vectors of inputs fill the sixteen registers.
constexpr int kUp = 4, kAcross = 3;

GRPO_HD void multiply_tile(const float* const (&up)[kUp], const float* const (&across)[kAcross], int64_t count,
                           double (&result)[kAcross][kUp]) {
  Floats sums[kUp][kAcross] = {};
  const auto step = [&](auto load) {
    Floats b[kAcross];
#pragma GCC unroll 8
    for (int j = 0; j < kAcross; ++j) b[j] = load(across[j]);
#pragma GCC unroll 8
    for (int i = 0; i < kUp; ++i) {
      const Floats a = load(up[i]);
#pragma GCC unroll 8
      for (int j = 0; j < kAcross; ++j) sums[i][j] = multiply_add(a, b[j], sums[i][j]);
    }
  };
  int64_t d = 0;
  for (; d + 8 <= count; d += 8) step([d](const float* row) { return load_lanes(row + d); });
  if (d < count) step([d, count](const float* row) { return load_padded(row + d, count - d, 0.0f); });
  static_assert(kUp == 4);
  for (int j = 0; j < kAcross; ++j) {
    store_quad(result[j], sum_each(halve(sums[0][j]), halve(sums[1][j]), halve(sums[2][j]), halve(sums[3][j])));
  }
}

// Adds the inner products over one block of columns. `row(i)` is row i at the first of them.
template <typename Row>
GRPO_HD void multiply_block(const Row& row, int n, int64_t count, bool is_first, const PromptMemory& memory) {
  const float *up[kUp], *across[kAcross];
  double result[kAcross][kUp];
  for (int i = 0; i < n; i += kUp) {
    for (int u = 0; u < kUp; ++u) up[u] = row(i + u < n ? i + u : i);
    for (int j = i; j < n; j += kAcross) {
      for (int a = 0; a < kAcross; ++a) across[a] = row(j + a < n ? j + a : j);
      multiply_tile(up, across, count, result);
      for (int u = 0; u < kUp && i + u < n; ++u) {
        double* const to = memory.matrix + static_cast<int64_t>(i + u) * memory.stride + j;
        for (int a = 0; a < kAcross && j + a < n; ++a) to[a] = is_first ? result[a][u] : to[a] + result[a][u];
      }
    }
  }
}

template <typename T>
GRPO_HD void widen(const T* from, int64_t count, float* to) {
  int64_t d = 0;
  for (; d + 8 <= count; d += 8) store_lanes(to + d, load_lanes(from + d));
  if (d < count) store_first(to + d, count - d, load_padded(from + d, count - d, T{}));
}

template <typename T>
GRPO_HD void multiply_halves(const T* const* rows, int n, int64_t depth, const PromptMemory& memory) {
  for (int64_t d = 0; d < depth; d += kDepthBlock) {
    const int64_t count = depth - d < kDepthBlock ? depth - d : kDepthBlock;
    for (int i = 0; i < n; ++i) widen(rows[i] + d, count, memory.rows + i * kDepthBlock);
    multiply_block([&](int i) { return memory.rows + i * kDepthBlock; }, n, count, d == 0, memory);
  }
}

GRPO_HD void fill(double* row, int from, int to, double value) {
  for (int i = from; i < to; ++i) row[i] = value;
}

GRPO_HD Tree tree_of(const PromptMemory& memory, int32_t* merges, double* heights) {
  return {memory.tree, memory.stride, memory.vector(0), memory.integer(0), memory.vector(1), merges, heights};
}

GRPO_HD Cuts cuts_of(const PromptMemory& memory) {
  return {memory.matrix,    memory.stride,     memory.vector(2),    memory.vector(3),
          memory.vector(4), memory.vector(5),  memory.vector(6),    memory.integer(1),
          memory.vector(7), memory.integer(2), memory.silhouettes()};
}

// Writes linkage distances to memory.tree, and finds the smallest and largest distance.
GRPO_HD void start_tree(Linkage linkage, const PromptMemory& memory, int n, double& lowest, double& highest) {
  const double factor = linkage_distance(linkage, 1);
  Quad low = broadcast(INFINITY), high = broadcast(0);
  fill(memory.vector(0), n, memory.stride, INFINITY);  // Tree::nearest
  for (int i = 0; i < n; ++i) {
    double* const from = memory.matrix + static_cast<int64_t>(i) * memory.stride;
    double* const to = memory.tree + static_cast<int64_t>(i) * memory.stride;
    fill(from, n, memory.stride, 0);  // 0 never is the largest
    from[i] = 0;
    for (int j = 0; j < memory.stride; j += kPad) {
      const Quad distances = load_quad(from + j);
      high = larger(distances, high);
      store_quad(to + j, distances * broadcast(factor));
    }
    fill(to, n, memory.stride, INFINITY);
    to[i] = INFINITY;
    for (int j = 0; j < memory.stride; j += kPad) low = smaller(load_quad(to + j), low);
  }
  lowest = INFINITY, highest = 0;
  for (int l = 0; l < kPad; ++l) {
    lowest = low[l] < lowest ? low[l] : lowest;
    highest = high[l] > highest ? high[l] : highest;
  }
  lowest /= factor;
}

}  // namespace

void multiply_rows(const float* const* rows, int n, int64_t depth, const PromptMemory& memory) {
  for (int64_t d = 0; d < depth; d += kDepthBlock) {
    const int64_t count = depth - d < kDepthBlock ? depth - d : kDepthBlock;
    multiply_block([&](int i) { return rows[i] + d; }, n, count, d == 0, memory);
  }
}
void multiply_rows(const Half* const* rows, int n, int64_t depth, const PromptMemory& memory) {
  multiply_halves(rows, n, depth, memory);
}
void multiply_rows(const BFloat16* const* rows, int n, int64_t depth, const PromptMemory& memory) {
  multiply_halves(rows, n, depth, memory);
}

void products_to_distances(const PromptMemory& memory, int n) {
  double* const inverses = memory.vector(0);
  const auto row = [&](int i) { return memory.matrix + static_cast<int64_t>(i) * memory.stride; };
  for (int i = 0; i < n; ++i) inverses[i] = inverse_length(row(i)[i]);
  for (int i = 0; i < n; ++i) {
    row(i)[i] = 0;
    for (int j = i + 1; j < n; ++j) row(i)[j] = cosine_distance(row(i)[j], inverses[i], inverses[j]);
    for (int j = i + 1; j < n; ++j) row(j)[i] = row(i)[j];
  }
}

Grouping group_items(const SimilaritySettings& settings, const PromptMemory& memory, int n, int32_t* labels) {
  double lowest = INFINITY, highest = 0;
  double* const scores = memory.vector(9);
  int32_t* const merges = memory.integer(3);
  if (n >= 3) {
    start_tree(settings.linkage, memory, n, lowest, highest);
    agglomerate(settings.linkage, tree_of(memory, merges, memory.vector(10)), n);
    score_cuts(cuts_of(memory), merges, n, settings.k_min, last_k(settings, n), scores);
  }
  const Grouping grouping = choose_cut(settings, scores, n, lowest, highest);
  if (n < 3) {
    for (int i = 0; i < n; ++i) labels[i] = 0;
  } else {
    write_labels(merges, n, grouping.groups, memory.integer(5), labels);
  }
  return grouping;
}

void link_items(Linkage linkage, const PromptMemory& memory, int n, int32_t* merges, double* heights) {
  double lowest, highest, previous = 0;
  start_tree(linkage, memory, n, lowest, highest);
  agglomerate(linkage, tree_of(memory, merges, heights), n);
  for (int m = 0; m + 1 < n; ++m) {  // rounding may put a later one of equal heights below
    previous = heights[m] > previous ? heights[m] : previous;
    heights[m] = merge_height(linkage, previous);
  }
}

double score_items(const PromptMemory& memory, int n, const int32_t* first) {
  for (int i = 0; i < n; ++i) fill(memory.matrix + static_cast<int64_t>(i) * memory.stride, n, memory.stride, 0);
  return score_labels(cuts_of(memory), first, n);
}

}  // namespace grpo_kernels::GRPO_SIMD
