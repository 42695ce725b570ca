#include <stdint.h>

#include "common/cuda/launch.h"
#include "common/cuda/team.cuh"
#include "logits_policy_loss/cuda.h"
#include "policy_loss/count.cuh"
#include "policy_loss/walk_tokens.cuh"
#include "token_logprobs/gradient.cuh"
#include "token_logprobs/sums.cuh"

// One block per row: its sums, the term of its token, and its gradient. The first pieces of the row stay in shared
// memory. What exceeds it, 74 KiB of 152,000 logits on an H100, is read again as soon as the sums are known, when it
// is in the L2 cache: 10 of 50 MB for all rows in progress.
namespace grpo_kernels {
namespace {

constexpr int kMaxThreads = 512;
constexpr int64_t kMaxBlocks = 1 << 12;  // further rows take turns
constexpr std::size_t kReserved = 4096;  // bytes of the block's static shared memory, and of the system

// Inputs of a row's gradient besides the row.
struct TokenGradient {
  double normalizer, by_logprob, by_entropy, entropy;
};

// The row of the policy that holds token t.
template <typename T>
__device__ int64_t row_of_token(const PolicyBatch<T>& in, int64_t t) {
  if (in.cu_seqlens == nullptr) return t / in.width;
  int64_t low = 0, high = in.rows;  // start(low) <= t, and high == rows or t < start(high)
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (in.cu_seqlens[middle] <= t) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// For one thread, which has written the token's log-prob. The batch is read again for every row, because what it holds
// would take registers of the loops over the row.
__device__ void differentiate_token(const PolicyArrays<float>& policy, const Counts& batch, bool needs_entropy_gradient,
                                    int64_t t, TokenGradient& token) {
  const PolicyBatch<float> in = batch_of(policy);
  const int64_t row = row_of_token(in, t);
  const Shares shares = in.shares(batch, policy.row_counts == nullptr ? Counts{} : policy.row_counts[row]);
  walk_tokens<float, WalkKind::kAny>(tokens_of(in, row, t, shares, policy.gradient), in.plan, 1, Team{0, 1, false});
  token.by_logprob = policy.gradient[t];
  token.by_entropy = needs_entropy_gradient ? in.entropy_gradient(t, shares) : 0;
}

template <typename T, bool kCapped, bool kEntropy>
__global__ void GRPO_BOUNDS(kMaxThreads)
    rows_kernel(const __grid_constant__ LogitsLossArrays<T> arrays, int64_t shared_pieces) {
  GRPO_DYNAMIC_SHARED(Piece<T>, kept);
  __shared__ __align__(16) unsigned char shared_sums[kMaxWarps * sizeof(RowSoftmax<float>)];
  __shared__ double shared_counts[kMaxWarps];
  __shared__ TokenGradient token;
  __shared__ __align__(16) unsigned char shared_batch[sizeof(Counts)];  // for the thread that reads it
  Counts* const batch = reinterpret_cast<Counts*>(shared_batch);
  const Counts counts = batch_counts(arrays.policy, shared_counts);
  if (threadIdx.x == 0) *batch = counts;
  const LogitArrays<T>& in = arrays.in;
  const int64_t columns = in.layout.columns;
  for (int64_t row = blockIdx.x; row < in.layout.rows; row += gridDim.x) {
    const int64_t target = in.targets[row];
    T* const to = arrays.gradient + arrays.gradient_layout.offset(row);
    if (target == kIgnoredTarget) {
      if (threadIdx.x == 0) {
        arrays.logprobs[row] = 0;
        if constexpr (kEntropy) arrays.entropy[row] = 0;
      }
      clear_row(to, columns);
      continue;
    }
    const T* const logits = in.logits + in.layout.offset(row);
    const RowMap map(in, row);
    const auto keep = [&](int64_t index, const Piece<T>& piece) {
      if (index < shared_pieces) kept[index] = piece;
    };
    const RowSoftmax<float> sums = block_merge(lane_sums<kCapped, kEntropy>(logits, columns, map, keep), map.factor,
                                               reinterpret_cast<RowSoftmax<float>*>(shared_sums));
    if (threadIdx.x == 0) {
      const RowResult result = result_of<kCapped>(sums, logits, columns, target, map);
      arrays.logprobs[row] = static_cast<float>(result.logprob);
      if constexpr (kEntropy) arrays.entropy[row] = static_cast<float>(result.entropy);
      token.normalizer = result.normalizer;
      token.entropy = kEntropy ? static_cast<float>(result.entropy) : 0;
      differentiate_token(arrays.policy, *batch, arrays.needs_entropy_gradient, row, token);
    }
    const bool has_target = target >= 0 && target < columns;
    const T target_logit = has_target ? logits[target] : T{};
    __syncthreads();  // the gradient of the token is known, and its logits may be overwritten
    const RowGradient<double> upstream(token.normalizer, token.by_logprob, token.by_entropy, token.entropy);
    if (upstream.is_zero()) {
      clear_row(to, columns);
    } else {
      const LogitGradient<kCapped, kEntropy> gradient(map, token.normalizer, upstream);
      const float of_target = gradient.of_target(to_float(target_logit));
      if (misalignment(logits) == misalignment(to)) {
        const Split<T> split(logits, columns);
        const Piece<T>* const pieces = reinterpret_cast<const Piece<T>*>(logits + split.head);
        Piece<T>* const written = reinterpret_cast<Piece<T>*>(to + split.head);
        const int64_t from_shared = split.pieces < shared_pieces ? split.pieces : shared_pieces;
        // the end of the row first: it was read last
        write_pieces(pieces + from_shared, written + from_shared, split.pieces - from_shared, gradient);
        write_pieces<T, T>(kept, written, from_shared, gradient);
        write_singles(logits, to, 0, split.head, gradient);
        write_singles(logits, to, split.tail, columns, gradient);
      } else {
        write_row(logits, to, columns, gradient);
      }
      __syncthreads();  // the target is written twice, and the next row overwrites `kept`
      if (has_target && threadIdx.x == 0) from_float(of_target, to[target]);
    }
  }
}

// Blocks of more threads for longer rows, of which fewer fit on a multiprocessor: one block of 512 or two of 256.
int threads_for(std::size_t row_bytes, std::size_t limit) {
  if (row_bytes > limit / 2) return kMaxThreads;
  return row_bytes > limit / 4 ? kMaxThreads / 2 : kMaxThreads / 4;
}

}  // namespace

template <typename T>
void launch_logits_policy_loss(LogitsLossArrays<T> arrays, void* stream) {
  launch_counts(arrays.policy, stream);
  arrays.policy.batch.entropy = arrays.entropy;
  const LogitLayout& layout = arrays.in.layout;
  const std::size_t row_bytes = (layout.columns * sizeof(T) + 15) / 16 * 16;
  const std::size_t limit = shared_memory_limit() - kReserved;
  const std::size_t bytes = row_bytes < limit ? row_bytes : limit;
  const dim3 grid(static_cast<unsigned>(layout.rows < kMaxBlocks ? layout.rows : kMaxBlocks));
  const bool capped = arrays.in.scaling.softcap > 0, entropy = arrays.entropy != nullptr;
  const auto kernel = capped ? (entropy ? rows_kernel<T, true, true> : rows_kernel<T, true, false>)
                             : (entropy ? rows_kernel<T, false, true> : rows_kernel<T, false, false>);
  launch(kernel, grid, dim3(threads_for(row_bytes, limit)), bytes, stream, arrays, static_cast<int64_t>(bytes / 16));
}

template void launch_logits_policy_loss<BFloat16>(LogitsLossArrays<BFloat16>, void*);

}  // namespace grpo_kernels
