#include <math.h>
#include <stdint.h>

#include "block_crew.cuh"
#include "similarity_groups.h"

// One block per prompt. Its distances become the tree's, are read again for the sums of clusters once the tree is
// done, and lie in shared memory where the device has enough.
namespace grpo_kernels {
namespace {

constexpr int kMostBlocks = 256;  // of prompts that are too large for shared memory; others take turns
constexpr float kAbsent = INFINITY;

int threads_for(int64_t size) { return size <= 64 ? kWarp : size <= 128 ? 128 : 256; }
__host__ __device__ int64_t stride_for(int64_t size) { return size | 1; }  // odd: columns in different banks

// What a block works in; `items` of each vector.
struct Workspace {
  static constexpr int kVectors = 11, kIntegers = 8;

  double *matrix, *vectors;
  int32_t* integers;
  Smallest* exchange;
  int items, stride;

  __device__ double* vector(int which) const { return vectors + which * items; }
  __device__ int32_t* integer(int which) const { return integers + which * items; }
  __device__ int32_t* places() const { return integer(7); }

  __device__ Tree tree() const {
    return {matrix, stride, vector(0), integer(0), vector(1), integer(1), vector(2)};  // merges: two of them
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
  Workspace found;
  found.items = items;
  found.stride = stride;
  found.matrix = matrices == nullptr ? shared : matrices + blockIdx.x * matrix;
  found.vectors = matrices == nullptr ? shared + matrix : shared;
  found.exchange = reinterpret_cast<Smallest*>(found.vectors + Workspace::kVectors * items);
  found.integers = reinterpret_cast<int32_t*>(found.exchange + kMaxWarps);
  return found;
}

// The places that take part, and how many they are.
template <typename TakesPart>
__device__ int find_places(const BlockCrew& crew, const Workspace& work, const float* distances, int size,
                           TakesPart takes_part) {
  int32_t* const there = work.integer(0);
  crew.for_each(size,
                [&](int k) { there[k] = isfinite(distances[static_cast<int64_t>(k) * size + k]) && takes_part(k); });
  crew.sync();
  if (crew.is_first()) {
    int count = 0;
    for (int k = 0; k < size; ++k) {
      if (there[k] != 0) work.places()[count++] = k;
    }
    there[0] = count;
  }
  crew.sync();
  const int count = there[0];
  crew.sync();
  return count;
}

// Distances times `factor` into the matrix, `own` on its diagonal.
__device__ void read_matrix(const BlockCrew& crew, const Workspace& work, const float* distances, int size, int n,
                            double factor, double own) {
  const int32_t* const places = work.places();
  for (int i = 0; i < n; ++i) {
    const float* const from = distances + static_cast<int64_t>(places[i]) * size;
    double* const to = work.matrix + static_cast<int64_t>(i) * work.stride;
    crew.for_each(n, [&](int j) { to[j] = i == j ? own : factor * from[places[j]]; });
  }
  crew.sync();
}

// Smallest and largest of the matrix beside its diagonal.
__device__ void find_extremes(const BlockCrew& crew, const Workspace& work, int n, double& lowest, double& highest) {
  double *const low = work.vector(0), *const negative = work.vector(1);
  crew.for_each(n, [&](int i) {
    double least = INFINITY, most = 0;
    for (int j = 0; j < n; ++j) {
      const double distance = work.matrix[static_cast<int64_t>(j) * work.stride + i];
      if (i != j && distance < least) least = distance;
      if (i != j && distance > most) most = distance;
    }
    low[i] = least;
    negative[i] = -most;
  });
  crew.sync();
  lowest = crew.first_minimum(low, 0, n).value;
  highest = -crew.first_minimum(negative, 0, n).value;
  crew.sync();
}

__global__ void __launch_bounds__(256, 1) cluster_kernel(const __grid_constant__ ClusterArrays in) {
  GRPO_DYNAMIC_SHARED(double, shared);
  const int size = static_cast<int>(in.prompts.size);
  const Workspace work = workspace(shared, in.matrices, size);
  const BlockCrew crew{work.exchange};
  for (int64_t p = blockIdx.x; p < in.prompts.count; p += gridDim.x) {
    const float* const distances = in.distances + p * size * size;
    const int64_t begin = in.prompts.begin(p);
    const int n = find_places(crew, work, distances, size, [](int) { return true; });
    double lowest = INFINITY, highest = 0;
    if (n >= 3) {
      read_matrix(crew, work, distances, size, n, 1, 0);
      find_extremes(crew, work, n, lowest, highest);
      read_matrix(crew, work, distances, size, n, as_linked(in.settings.linkage, 1), INFINITY);
      agglomerate(crew, in.settings.linkage, work.tree(), n);
      read_matrix(crew, work, distances, size, n, 1, 0);
      score_cuts(crew, work.cuts(), work.merges(), n, in.settings.k_min, last_k(in.settings, n), work.scores());
    }
    int32_t* const found = work.integer(5);
    if (crew.is_first()) {
      const Grouping grouping = choose_cut(in.settings, work.scores(), n, lowest, highest);
      write_labels(work.merges(), n, n < 3 ? n : grouping.groups, work.integer(6), found);
      in.num_groups[p] = grouping.groups;
      in.silhouette[p] = static_cast<float>(grouping.silhouette);
      in.best_k[p] = grouping.best_k;
      in.verdict[p] = grouping.verdict;
    }
    const int rows = in.prompts.rows(p);
    crew.for_each(rows, [&](int k) {
      in.labels[in.prompts.row(begin + k)] = -1;
      if (in.ids != nullptr) in.ids[in.prompts.row(begin + k)] = -1;
    });
    crew.sync();
    crew.for_each(n, [&](int i) {
      const int64_t row = in.prompts.row(begin + work.places()[i]);
      const int32_t label = n < 3 ? 0 : found[i];
      in.labels[row] = label;
      if (in.ids != nullptr) in.ids[row] = begin + label;
    });
    crew.sync();
  }
}

__global__ void __launch_bounds__(256, 1) tree_kernel(const __grid_constant__ TreeArrays in) {
  GRPO_DYNAMIC_SHARED(double, shared);
  const int size = static_cast<int>(in.prompts.size), most = size - 1;
  const Workspace work = workspace(shared, in.matrices, size);
  const BlockCrew crew{work.exchange};
  for (int64_t p = blockIdx.x; p < in.prompts.count; p += gridDim.x) {
    const float* const distances = in.distances + p * size * size;
    const int n = find_places(crew, work, distances, size, [](int) { return true; });
    read_matrix(crew, work, distances, size, n, as_linked(in.linkage, 1), INFINITY);
    agglomerate(crew, in.linkage, work.tree(), n);
    crew.sync();
    if (crew.is_first()) {
      double previous = 0;  // of equal heights rounding may put a later one below
      for (int m = 0; m + 1 < n; ++m) {
        previous = work.heights()[m] > previous ? work.heights()[m] : previous;
        work.heights()[m] = as_height(in.linkage, previous);
      }
    }
    crew.sync();
    crew.for_each(most, [&](int m) {
      const bool is_merge = m + 1 < n;
      int32_t* const to = in.merges + (p * most + m) * 2;
      to[0] = is_merge ? work.places()[work.merges()[2 * m]] : -1;
      to[1] = is_merge ? work.places()[work.merges()[2 * m + 1]] : -1;
      in.heights[p * most + m] = is_merge ? static_cast<float>(work.heights()[m]) : kAbsent;
    });
    crew.sync();
  }
}

__global__ void __launch_bounds__(256, 1) silhouette_kernel(const __grid_constant__ SilhouetteArrays in) {
  GRPO_DYNAMIC_SHARED(double, shared);
  const int size = static_cast<int>(in.prompts.size);
  const Workspace work = workspace(shared, in.matrices, size);
  const BlockCrew crew{work.exchange};
  for (int64_t p = blockIdx.x; p < in.prompts.count; p += gridDim.x) {
    const float* const distances = in.distances + p * size * size;
    const int64_t* const labels = in.labels + p * size;
    const int n = find_places(crew, work, distances, size, [&](int k) { return labels[k] >= 0; });
    read_matrix(crew, work, distances, size, n, 1, 0);
    int32_t* const first = work.integer(5);
    crew.for_each(n, [&](int i) {
      first[i] = 0;
      while (labels[work.places()[first[i]]] != labels[work.places()[i]]) ++first[i];
    });
    crew.sync();
    const Cuts cuts = work.cuts();
    const double score = score_labels(crew, cuts, first, n);
    if (crew.is_first()) in.scores[p] = static_cast<float>(score);
    crew.for_each(size, [&](int k) { in.samples[p * size + k] = NAN; });
    crew.sync();
    crew.for_each(n, [&](int i) { in.samples[p * size + work.places()[i]] = static_cast<float>(cuts.result[i]); });
    crew.sync();
  }
}

template <typename Arrays>
void launch_prompts(void (*kernel)(Arrays), const Arrays& arrays, void* stream) {
  const int64_t size = arrays.prompts.size, prompts = arrays.prompts.count;
  const bool is_shared = arrays.matrices == nullptr;
  const int64_t blocks = is_shared || prompts < kMostBlocks ? prompts : kMostBlocks;
  launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(threads_for(size)), shared_bytes(size, is_shared), stream,
         arrays);
}

}  // namespace

int64_t matrix_room(const Prompts& prompts) {
  const int64_t blocks = prompts.count < kMostBlocks ? prompts.count : kMostBlocks;
  const bool is_shared = shared_bytes(prompts.size, true) <= shared_memory_limit();
  return is_shared ? 0 : blocks * prompts.size * stride_for(prompts.size);
}

void launch_clusters(const ClusterArrays& arrays, void* stream) { launch_prompts(cluster_kernel, arrays, stream); }
void launch_trees(const TreeArrays& arrays, void* stream) { launch_prompts(tree_kernel, arrays, stream); }
void launch_silhouettes(const SilhouetteArrays& arrays, void* stream) {
  launch_prompts(silhouette_kernel, arrays, stream);
}

}  // namespace grpo_kernels
