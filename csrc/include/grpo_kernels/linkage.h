#pragma once

#include <math.h>
#include <stdint.h>

#include "grpo_kernels/host_device.h"

// Agglomerative clustering of n items by their distances. A cluster goes by its smallest item; the pair that is merged
// is the one with the smallest (distance, lower item, higher item), so that ties have one answer on every backend.
//
// `Crew` is who does the work: one host thread (simd/host_crew.h) or the threads of a CUDA block. It has
//   for_each(n, f)                f(i) for every i < n; an i always falls to the same thread
//   first_minimum(v, begin, n)    the smallest of v[begin..n) and the first place of it; reached by all threads alike
//   scan_minimum(v, begin, n)     the same by one thread alone
//   sync()                        what the threads wrote before is seen by all after
//   is_first()                    true for one thread
// Memory is read up to n rounded up to kPad items, which holds infinity there.
namespace grpo_kernels {

enum Linkage : int { kSingle = 0, kComplete = 1, kAverage = 2, kWard = 3 };

constexpr int kPad = 4;
constexpr int kMostItems = 256;

struct Smallest {
  double value;
  int place;
};

GRPO_HD bool comes_before(const Smallest& a, const Smallest& b) {
  return a.value < b.value || (a.value == b.value && a.place < b.place);
}

// Of two clusters, with `na` and `nb` items, as one: its distance to a third of `nc` (Lance and Williams).
template <int kLinkage>
GRPO_HD double joint_distance(double ac, double bc, double ab, double na, double nb, double nc) {
  if constexpr (kLinkage == kSingle) return bc < ac ? bc : ac;
  if constexpr (kLinkage == kComplete) return bc > ac ? bc : ac;
  if constexpr (kLinkage == kAverage) return (na * ac + nb * bc) / (na + nb);
  return ((na + nc) * ac + (nb + nc) * bc - nc * ab) / (na + nb + nc);
}

// Ward's rule is about squared distances of unit vectors, 2 (1 - cos); what is reported are their roots.
GRPO_HD double as_linked(int linkage, double distance) { return linkage == kWard ? 2 * distance : distance; }
GRPO_HD double as_height(int linkage, double linked) { return linkage == kWard ? sqrt(linked) : linked; }

struct Tree {
  double* distance;  // n rows of `stride`, symmetric, infinite on the diagonal; used up
  int stride;
  double* nearest;   // [n]: of the higher items the distance of the nearest,
  int32_t* partner;  // [n]: and which that is
  double* size;      // [n]; 0: part of another
  int32_t* merges;   // [2 (n - 1)]: lower item, higher item
  double* heights;   // [n - 1], as linked

  GRPO_HD double* row(int i) const { return distance + static_cast<int64_t>(i) * stride; }
};

template <typename Crew>
GRPO_HD void look_around(const Crew& crew, const Tree& tree, int n, int i) {
  const Smallest found = crew.scan_minimum(tree.row(i), i + 1, n);
  tree.nearest[i] = found.value;
  tree.partner[i] = found.place;
}

// What item i knows of its nearest, now that `low` and `high` are one. Its row is up to date.
template <typename Crew>
GRPO_HD void look_again(const Crew& crew, const Tree& tree, int n, int i, int low, int high) {
  if (tree.size[i] == 0 || i >= high) return;
  const double now = i < low ? tree.row(i)[low] : INFINITY;
  const bool was_theirs = tree.partner[i] == low || tree.partner[i] == high;
  if (was_theirs ? now <= tree.nearest[i] : comes_before({now, low}, {tree.nearest[i], tree.partner[i]})) {
    tree.nearest[i] = now;
    tree.partner[i] = low;
  } else if (was_theirs) {
    look_around(crew, tree, n, i);
  }
}

template <int kLinkage, typename Crew>
GRPO_HD void merge_all(const Crew& crew, const Tree& tree, int n) {
  crew.for_each(n, [&](int i) {
    tree.size[i] = 1;
    look_around(crew, tree, n, i);
  });
  for (int merge = 0; merge + 1 < n; ++merge) {
    crew.sync();
    const Smallest best = crew.first_minimum(tree.nearest, 0, n);
    const int low = best.place, high = tree.partner[low];
    const double na = tree.size[low], nb = tree.size[high];
    double *const row_low = tree.row(low), *const row_high = tree.row(high);
    crew.sync();  // all have read what is written next
    crew.for_each(n, [&](int c) {
      row_low[c] = joint_distance<kLinkage>(row_low[c], row_high[c], best.value, na, nb, tree.size[c]);
    });
    crew.sync();
    if (crew.is_first()) {
      row_low[low] = row_low[high] = INFINITY;
      tree.size[low] = na + nb;
      tree.size[high] = 0;
      tree.nearest[high] = INFINITY;
      tree.merges[2 * merge] = low;
      tree.merges[2 * merge + 1] = high;
      tree.heights[merge] = best.value;
    }
    crew.sync();
    crew.for_each(n, [&](int c) {
      if (c == low) return;  // other threads read this row; it is up to date
      double* const row = tree.row(c);
      row[low] = row_low[c];
      row[high] = INFINITY;
      look_again(crew, tree, n, c, low, high);
    });
    crew.for_each(1, [&](int) { look_around(crew, tree, n, low); });
  }
  crew.sync();
}

template <typename Crew>
GRPO_HD void agglomerate(const Crew& crew, int linkage, const Tree& tree, int n) {
  switch (linkage) {
    case kSingle:
      return merge_all<kSingle>(crew, tree, n);
    case kComplete:
      return merge_all<kComplete>(crew, tree, n);
    case kAverage:
      return merge_all<kAverage>(crew, tree, n);
    default:
      return merge_all<kWard>(crew, tree, n);
  }
}

}  // namespace grpo_kernels
