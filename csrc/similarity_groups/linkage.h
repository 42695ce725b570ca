#pragma once

#include <math.h>
#include <stdint.h>

#include "common/host_device.h"
#include "common/settings.h"

// Agglomerative clustering of n items by their distances. A cluster is represented by its smallest item; the pair that
// is merged has the smallest (distance, lower item, higher item), so that every backend breaks ties alike.
//
// Here is what decides; host_tree.h and block_tree.cuh walk over the items, one CPU thread or the threads of a block.
namespace grpo_kernels {

// In the order of the names in grpo_kernels/ops/similarity_groups/config.py; tests/test_codes.py compares them.
GRPO_CODES(Linkage, int, kSingle, kComplete, kAverage, kWard);

constexpr int kMaxItems = 256;

struct Smallest {
  double value;
  int index;
};

GRPO_HD bool comes_before(const Smallest& a, const Smallest& b) {
  return a.value < b.value || (a.value == b.value && a.index < b.index);
}

// Distance of the union of clusters a and b to cluster c, which have na, nb and nc items (Lance and Williams).
template <Linkage kLinkage>
GRPO_HD double merged_distance(double ac, double bc, double ab, double na, double nb, double nc) {
  if constexpr (kLinkage == Linkage::kSingle) return bc < ac ? bc : ac;
  if constexpr (kLinkage == Linkage::kComplete) return bc > ac ? bc : ac;
  if constexpr (kLinkage == Linkage::kAverage) return (na * ac + nb * bc) / (na + nb);
  return ((na + nc) * ac + (nb + nc) * bc - nc * ab) / (na + nb + nc);
}

// Ward's linkage uses the squared distances of unit vectors, 2 (1 - cos), and reports their roots.
GRPO_HD double linkage_distance(Linkage linkage, double cosine_distance) {
  return linkage == Linkage::kWard ? 2 * cosine_distance : cosine_distance;
}
GRPO_HD double merge_height(Linkage linkage, double linkage_distance) {
  return linkage == Linkage::kWard ? sqrt(linkage_distance) : linkage_distance;
}

// Updates the nearest higher item of an item below `high` after `high` was merged into `low`, at the distance `merged`:
// infinite for an item above `low`. Returns false if the nearest is among the others, and must be searched.
GRPO_HD bool update_nearest(Smallest& nearest, double merged, int low, int high) {
  const bool lost_partner = nearest.index == low || nearest.index == high;
  if (lost_partner ? merged <= nearest.value : comes_before({merged, low}, nearest)) {
    nearest = {merged, low};
    return true;
  }
  return !lost_partner;
}

}  // namespace grpo_kernels
