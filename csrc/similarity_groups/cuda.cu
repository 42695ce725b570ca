#include "similarity_groups/cuda.h"
#include "similarity_groups/workspace.cuh"

// One block per prompt, with a thread for each of its items. The tree overwrites its matrix of distances, so they are
// read again for the silhouettes. Kernels exist for one warp, for several, and for several with the matrix in global
// memory, where shared memory is too small for it.
namespace grpo_kernels {
namespace {

constexpr int kMaxBlocks = 256;  // with a matrix in global memory each; further prompts take turns
constexpr float kAbsent = INFINITY;

// Global memory takes so long that a search loads most of a row at once; eight loads take too many registers.
template <bool kIsWarp, bool kIsShared>
using Block = PromptBlock<kIsWarp, kIsWarp     ? 1
                                   : kIsShared ? 2
                                               : kMaxItemWarps>;

template <typename Block>
__device__ void write_labels(const Block& block, const ClusterArrays& in, const Workspace& work, int64_t p, int n,
                             int groups) {
  const int label = n < 3 ? 0 : label_in_cut(block, work.cuts(), groups, n, work.merges.high);
  const int64_t begin = in.prompts.begin(p);
  const int item = block.item(), rows = in.prompts.rows(p);
  for (int k = item; k < rows; k += static_cast<int>(blockDim.x)) {
    const int64_t row = in.prompts.row(begin + k);
    in.labels[row] = -1;
    if (in.ids != nullptr) in.ids[row] = -1;
  }
  block.sync();
  if (item >= n) return;
  const int64_t row = in.prompts.row(begin + work.positions[item]);
  in.labels[row] = label;
  if (in.ids != nullptr) in.ids[row] = begin + label;
}

template <bool kIsWarp, bool kIsShared>
__global__ void GRPO_BOUNDS(kIsWarp ? kWarp : kMaxItems) cluster_kernel(const __grid_constant__ ClusterArrays in) {
  GRPO_DYNAMIC_SHARED(double, shared);
  const int size = static_cast<int>(in.prompts.size);
  const Workspace work = workspace<kIsShared>(shared, in.matrices, size, static_cast<int>(blockDim.x) / kWarp);
  const Block<kIsWarp, kIsShared> block{work.of_warps};
  for (int64_t p = blockIdx.x; p < in.prompts.count; p += gridDim.x) {
    const float* const distances = in.distances + p * size * size;
    const int n = find_positions(block, work, distances, size, [](int) { return true; });
    float lowest = INFINITY, highest = 0;
    if (n >= 3) {
      const int k_max = last_k(in.settings, n);
      read_matrix(
          block, work, distances, size, n, linkage_distance(in.settings.linkage, 1), [](int i) { return i; },
          [&](float distance) {
            lowest = distance < lowest ? distance : lowest;
            highest = distance > highest ? distance : highest;
          });
      lowest = __uint_as_float(block.minimum(__float_as_uint(lowest)));
      highest = __uint_as_float(~block.minimum(~__float_as_uint(highest)));
      agglomerate(block, in.settings.linkage, work.matrix, work.stride, n, work.sizes(), work.merges, work.heights());
      assign_slots(block, work.cuts(), work.merges, n - 1, n);
      read_matrix(block, work, distances, size, n, 1, [&](int i) { return work.slot[i]; }, [](float) {});
      score_cuts(block, work.cuts(), work.merges, n, in.settings.k_min, k_max);
    }
    if (block.is_first()) {
      const Grouping grouping = choose_cut(in.settings, work.scores, n, lowest, highest);
      work.of_warps[0].low = grouping.groups;
      in.num_groups[p] = grouping.groups;
      in.silhouette[p] = static_cast<float>(grouping.silhouette);
      in.best_k[p] = grouping.best_k;
      in.verdict[p] = static_cast<uint8_t>(grouping.verdict);
    }
    block.sync();
    write_labels(block, in, work, p, n, work.of_warps[0].low);
    block.sync();
  }
}

template <bool kIsWarp, bool kIsShared>
__global__ void GRPO_BOUNDS(kIsWarp ? kWarp : kMaxItems) tree_kernel(const __grid_constant__ TreeArrays in) {
  GRPO_DYNAMIC_SHARED(double, shared);
  const int size = static_cast<int>(in.prompts.size), max_merges = size - 1;
  const Workspace work = workspace<kIsShared>(shared, in.matrices, size, static_cast<int>(blockDim.x) / kWarp);
  const Block<kIsWarp, kIsShared> block{work.of_warps};
  for (int64_t p = blockIdx.x; p < in.prompts.count; p += gridDim.x) {
    const float* const distances = in.distances + p * size * size;
    const int n = find_positions(block, work, distances, size, [](int) { return true; }), m = block.item();
    read_matrix(
        block, work, distances, size, n, linkage_distance(in.linkage, 1), [](int i) { return i; }, [](float) {});
    agglomerate(block, in.linkage, work.matrix, work.stride, n, work.sizes(), work.merges, work.heights());
    if (m < max_merges) {
      const bool is_merge = m + 1 < n;
      int32_t* const to = in.merges + (p * max_merges + m) * 2;
      to[0] = is_merge ? work.positions[work.merges.low[m]] : -1;
      to[1] = is_merge ? work.positions[work.merges.high[m]] : -1;
      in.heights[p * max_merges + m] =
          is_merge ? static_cast<float>(merge_height(in.linkage, work.heights()[m])) : kAbsent;
    }
    block.sync();
  }
}

// Turns labels into merges: each item but the first with its label is merged with that one, in the order of the items.
// Returns the number of clusters.
template <typename Block>
__device__ int merge_labels(const Block& block, const Workspace& work, const int64_t* labels, int n) {
  const int item = block.item();
  int mates = 0, first = item;
  if (item < n) {
    const int64_t label = labels[work.positions[item]];
    for (int i = item - 1; i >= 0; --i) {
      const bool is_mate = labels[work.positions[i]] == label;
      mates += is_mate;
      first = is_mate ? i : first;
    }
  }
  const bool is_merge = first < item;
  const unsigned of_warp = __ballot_sync(kAllLanes, is_merge);
  int earlier, all;
  block.add_up(__popc(of_warp), earlier, all);
  if (is_merge) {
    const int merge = earlier + __popc(of_warp & ((1u << block.lane()) - 1));
    work.merges.low[merge] = first;
    work.merges.high[merge] = item;
    work.merges.size[merge] = mates + 1;
  }
  block.sync();
  return n - all;
}

template <bool kIsWarp, bool kIsShared>
__global__ void GRPO_BOUNDS(kIsWarp ? kWarp : kMaxItems)
    silhouette_kernel(const __grid_constant__ SilhouetteArrays in) {
  GRPO_DYNAMIC_SHARED(double, shared);
  const int size = static_cast<int>(in.prompts.size);
  const Workspace work = workspace<kIsShared>(shared, in.matrices, size, static_cast<int>(blockDim.x) / kWarp);
  const Block<kIsWarp, kIsShared> block{work.of_warps};
  for (int64_t p = blockIdx.x; p < in.prompts.count; p += gridDim.x) {
    const float* const distances = in.distances + p * size * size;
    const int64_t* const labels = in.labels + p * size;
    const int n = find_positions(block, work, distances, size, [&](int k) { return labels[k] >= 0; });
    const int clusters = merge_labels(block, work, labels, n), item = block.item();
    assign_slots(block, work.cuts(), work.merges, n - clusters, n);
    read_matrix(block, work, distances, size, n, 1, [&](int i) { return work.slot[i]; }, [](float) {});
    const bool has_score = clusters > 1;
    double sample = NAN;
    if (has_score) sample = score_cuts(block, work.cuts(), work.merges, n, clusters, clusters);
    if (block.is_first()) in.scores[p] = has_score ? static_cast<float>(work.scores[clusters]) : NAN;
    if (item < size) in.samples[p * size + item] = NAN;
    block.sync();
    if (item < n) in.samples[p * size + work.positions[item]] = static_cast<float>(sample);
    block.sync();
  }
}

template <typename Arrays>
struct Kernels {
  void (*of_warp)(Arrays);
  void (*in_shared)(Arrays);
  void (*in_global)(Arrays);
};

template <typename Arrays>
void launch_prompts(const Kernels<Arrays>& kernels, const Arrays& arrays, void* stream) {
  const int64_t size = arrays.prompts.size, prompts = arrays.prompts.count;
  const bool is_shared = arrays.matrices == nullptr;
  const int64_t blocks = is_shared || prompts < kMaxBlocks ? prompts : kMaxBlocks;
  const int warps = warps_for(size);
  launch(!is_shared   ? kernels.in_global
         : warps == 1 ? kernels.of_warp
                      : kernels.in_shared,
         dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(warps * kWarp)),
         Workspace::shared_bytes(size, is_shared), stream, arrays);
}

}  // namespace

int64_t matrix_doubles(const Prompts& prompts) {
  const int64_t blocks = prompts.count < kMaxBlocks ? prompts.count : kMaxBlocks;
  const bool is_shared = Workspace::shared_bytes(prompts.size, true) <= shared_memory_limit();
  return is_shared ? 0 : blocks * doubles_for_matrix(prompts.size);
}

void launch_clusters(const ClusterArrays& arrays, void* stream) {
  launch_prompts<ClusterArrays>({cluster_kernel<true, true>, cluster_kernel<false, true>, cluster_kernel<false, false>},
                                arrays, stream);
}
void launch_trees(const TreeArrays& arrays, void* stream) {
  launch_prompts<TreeArrays>({tree_kernel<true, true>, tree_kernel<false, true>, tree_kernel<false, false>}, arrays,
                             stream);
}
void launch_silhouettes(const SilhouetteArrays& arrays, void* stream) {
  launch_prompts<SilhouetteArrays>(
      {silhouette_kernel<true, true>, silhouette_kernel<false, true>, silhouette_kernel<false, false>}, arrays, stream);
}

}  // namespace grpo_kernels
