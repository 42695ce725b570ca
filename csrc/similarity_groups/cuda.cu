#include <math.h>
#include <stdint.h>

#include "similarity_groups/block_crew.cuh"
#include "similarity_groups/cuda.h"

// One block per prompt. The tree overwrites its copy of the distances, so they are read again for the silhouettes. The
// copy lies in shared memory where that is large enough.
namespace grpo_kernels {
namespace {

constexpr int kMaxBlocks = 256;  // with a matrix in global memory each; further prompts take turns
constexpr float kAbsent = INFINITY;

int threads_for(int64_t size) { return size <= 64 ? kWarp : size <= 128 ? 128 : 256; }
__host__ __device__ int64_t stride_for(int64_t size) { return size | 1; }  // odd: a column spreads over the banks

// Working memory of a block; vectors have `items` elements.
struct Workspace {
  static constexpr int kVectors = 11, kIntegers = 8;

  double *matrix, *vectors;
  int32_t* integers;
  Smallest* warp_results;
  int items, stride;

  __device__ double* vector(int index) const { return vectors + index * items; }
  __device__ int32_t* integer(int index) const { return integers + index * items; }
  __device__ int32_t* positions() const { return integer(7); }

  __device__ Tree tree() const {
    return {matrix, stride, vector(0), integer(0), vector(1), integer(1), vector(2)};  // merges take integers 1 and 2
  }
  __device__ const int32_t* merges() const { return integer(1); }
  __device__ double* heights() const { return vector(2); }
  __device__ double* scores() const { return vector(3); }
  __device__ Cuts cuts() const {
    return {matrix,    stride,     vector(4), vector(5),  vector(6), vector(7),
            vector(8), integer(3), vector(9), integer(4), vector(10)};
  }
};

std::size_t shared_bytes(int64_t size, bool with_matrix) {
  const std::size_t matrix = with_matrix ? size * stride_for(size) : 0, items = size > 0 ? size : 1;
  return (matrix + Workspace::kVectors * items) * sizeof(double) + kMaxWarps * sizeof(Smallest) +
         Workspace::kIntegers * items * sizeof(int32_t);
}

__device__ Workspace workspace(double* shared, double* matrices, int64_t size) {
  const int items = size > 0 ? static_cast<int>(size) : 1, stride = static_cast<int>(stride_for(size));
  const int64_t matrix = size * stride;
  Workspace work;
  work.items = items;
  work.stride = stride;
  work.matrix = matrices == nullptr ? shared : matrices + blockIdx.x * matrix;
  work.vectors = matrices == nullptr ? shared + matrix : shared;
  work.warp_results = reinterpret_cast<Smallest*>(work.vectors + Workspace::kVectors * items);
  work.integers = reinterpret_cast<int32_t*>(work.warp_results + kMaxWarps);
  return work;
}

// Writes the positions of the responses to cluster to work.positions(), and returns their number.
template <typename IsIncluded>
__device__ int find_positions(const BlockCrew& crew, const Workspace& work, const float* distances, int size,
                              IsIncluded is_included) {
  int32_t* const included = work.integer(0);
  crew.for_each(
      size, [&](int k) { included[k] = isfinite(distances[static_cast<int64_t>(k) * size + k]) && is_included(k); });
  crew.sync();
  if (crew.is_first()) {
    int count = 0;
    for (int k = 0; k < size; ++k) {
      if (included[k] != 0) work.positions()[count++] = k;
    }
    included[0] = count;
  }
  crew.sync();
  const int count = included[0];
  crew.sync();
  return count;
}

// Copies distances times `factor` to the matrix, with `diagonal` on its diagonal.
__device__ void read_matrix(const BlockCrew& crew, const Workspace& work, const float* distances, int size, int n,
                            double factor, double diagonal) {
  const int32_t* const positions = work.positions();
  for (int i = 0; i < n; ++i) {
    const float* const from = distances + static_cast<int64_t>(positions[i]) * size;
    double* const to = work.matrix + static_cast<int64_t>(i) * work.stride;
    crew.for_each(n, [&](int j) { to[j] = i == j ? diagonal : factor * from[positions[j]]; });
  }
  crew.sync();
}

// Smallest and largest element of the matrix off its diagonal.
__device__ void find_extremes(const BlockCrew& crew, const Workspace& work, int n, double& lowest, double& highest) {
  double *const low = work.vector(0), *const negative = work.vector(1);
  crew.for_each(n, [&](int i) {
    double smallest = INFINITY, largest = 0;
    for (int j = 0; j < n; ++j) {
      const double distance = work.matrix[static_cast<int64_t>(j) * work.stride + i];
      if (i != j && distance < smallest) smallest = distance;
      if (i != j && distance > largest) largest = distance;
    }
    low[i] = smallest;
    negative[i] = -largest;
  });
  crew.sync();
  lowest = crew.first_minimum(low, 0, n).value;
  highest = -crew.first_minimum(negative, 0, n).value;
  crew.sync();
}

__global__ void GRPO_BOUNDS(256) cluster_kernel(const __grid_constant__ ClusterArrays in) {
  GRPO_DYNAMIC_SHARED(double, shared);
  const int size = static_cast<int>(in.prompts.size);
  const Workspace work = workspace(shared, in.matrices, size);
  const BlockCrew crew{work.warp_results};
  for (int64_t p = blockIdx.x; p < in.prompts.count; p += gridDim.x) {
    const float* const distances = in.distances + p * size * size;
    const int64_t begin = in.prompts.begin(p);
    const int n = find_positions(crew, work, distances, size, [](int) { return true; });
    double lowest = INFINITY, highest = 0;
    if (n >= 3) {
      read_matrix(crew, work, distances, size, n, 1, 0);
      find_extremes(crew, work, n, lowest, highest);
      read_matrix(crew, work, distances, size, n, linkage_distance(in.settings.linkage, 1), INFINITY);
      agglomerate(crew, in.settings.linkage, work.tree(), n);
      read_matrix(crew, work, distances, size, n, 1, 0);
      score_cuts(crew, work.cuts(), work.merges(), n, in.settings.k_min, last_k(in.settings, n), work.scores());
    }
    int32_t* const labels = work.integer(5);
    if (crew.is_first()) {
      const Grouping grouping = choose_cut(in.settings, work.scores(), n, lowest, highest);
      write_labels(work.merges(), n, n < 3 ? n : grouping.groups, work.integer(6), labels);
      in.num_groups[p] = grouping.groups;
      in.silhouette[p] = static_cast<float>(grouping.silhouette);
      in.best_k[p] = grouping.best_k;
      in.verdict[p] = static_cast<uint8_t>(grouping.verdict);
    }
    const int rows = in.prompts.rows(p);
    crew.for_each(rows, [&](int k) {
      in.labels[in.prompts.row(begin + k)] = -1;
      if (in.ids != nullptr) in.ids[in.prompts.row(begin + k)] = -1;
    });
    crew.sync();
    crew.for_each(n, [&](int i) {
      const int64_t row = in.prompts.row(begin + work.positions()[i]);
      const int32_t label = n < 3 ? 0 : labels[i];
      in.labels[row] = label;
      if (in.ids != nullptr) in.ids[row] = begin + label;
    });
    crew.sync();
  }
}

__global__ void GRPO_BOUNDS(256) tree_kernel(const __grid_constant__ TreeArrays in) {
  GRPO_DYNAMIC_SHARED(double, shared);
  const int size = static_cast<int>(in.prompts.size), max_merges = size - 1;
  const Workspace work = workspace(shared, in.matrices, size);
  const BlockCrew crew{work.warp_results};
  for (int64_t p = blockIdx.x; p < in.prompts.count; p += gridDim.x) {
    const float* const distances = in.distances + p * size * size;
    const int n = find_positions(crew, work, distances, size, [](int) { return true; });
    read_matrix(crew, work, distances, size, n, linkage_distance(in.linkage, 1), INFINITY);
    agglomerate(crew, in.linkage, work.tree(), n);
    crew.sync();
    if (crew.is_first()) {
      double previous = 0;  // rounding may put a later one of equal heights below
      for (int m = 0; m + 1 < n; ++m) {
        previous = work.heights()[m] > previous ? work.heights()[m] : previous;
        work.heights()[m] = merge_height(in.linkage, previous);
      }
    }
    crew.sync();
    crew.for_each(max_merges, [&](int m) {
      const bool is_merge = m + 1 < n;
      int32_t* const to = in.merges + (p * max_merges + m) * 2;
      to[0] = is_merge ? work.positions()[work.merges()[2 * m]] : -1;
      to[1] = is_merge ? work.positions()[work.merges()[2 * m + 1]] : -1;
      in.heights[p * max_merges + m] = is_merge ? static_cast<float>(work.heights()[m]) : kAbsent;
    });
    crew.sync();
  }
}

__global__ void GRPO_BOUNDS(256) silhouette_kernel(const __grid_constant__ SilhouetteArrays in) {
  GRPO_DYNAMIC_SHARED(double, shared);
  const int size = static_cast<int>(in.prompts.size);
  const Workspace work = workspace(shared, in.matrices, size);
  const BlockCrew crew{work.warp_results};
  for (int64_t p = blockIdx.x; p < in.prompts.count; p += gridDim.x) {
    const float* const distances = in.distances + p * size * size;
    const int64_t* const labels = in.labels + p * size;
    const int n = find_positions(crew, work, distances, size, [&](int k) { return labels[k] >= 0; });
    read_matrix(crew, work, distances, size, n, 1, 0);
    int32_t* const first = work.integer(5);
    crew.for_each(n, [&](int i) {
      first[i] = 0;
      while (labels[work.positions()[first[i]]] != labels[work.positions()[i]]) ++first[i];
    });
    crew.sync();
    const Cuts cuts = work.cuts();
    const double score = score_labels(crew, cuts, first, n);
    if (crew.is_first()) in.scores[p] = static_cast<float>(score);
    crew.for_each(size, [&](int k) { in.samples[p * size + k] = NAN; });
    crew.sync();
    crew.for_each(n, [&](int i) { in.samples[p * size + work.positions()[i]] = static_cast<float>(cuts.result[i]); });
    crew.sync();
  }
}

template <typename Arrays>
void launch_prompts(void (*kernel)(Arrays), const Arrays& arrays, void* stream) {
  const int64_t size = arrays.prompts.size, prompts = arrays.prompts.count;
  const bool is_shared = arrays.matrices == nullptr;
  const int64_t blocks = is_shared || prompts < kMaxBlocks ? prompts : kMaxBlocks;
  launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(threads_for(size)), shared_bytes(size, is_shared), stream,
         arrays);
}

}  // namespace

int64_t matrix_doubles(const Prompts& prompts) {
  const int64_t blocks = prompts.count < kMaxBlocks ? prompts.count : kMaxBlocks;
  const bool is_shared = shared_bytes(prompts.size, true) <= shared_memory_limit();
  return is_shared ? 0 : blocks * prompts.size * stride_for(prompts.size);
}

void launch_clusters(const ClusterArrays& arrays, void* stream) { launch_prompts(cluster_kernel, arrays, stream); }
void launch_trees(const TreeArrays& arrays, void* stream) { launch_prompts(tree_kernel, arrays, stream); }
void launch_silhouettes(const SilhouetteArrays& arrays, void* stream) {
  launch_prompts(silhouette_kernel, arrays, stream);
}

}  // namespace grpo_kernels
