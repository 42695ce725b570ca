#pragma once

#include <math.h>

#include "endpoint_segments/row_items.cuh"

// Finds the ends of a tile's segments. Whether a token ends one depends on all tokens since the last end; the threads
// start at guesses of that and correct each other.
namespace grpo_kernels {
namespace {

constexpr int kChunk = 32;  // tokens that a thread cuts
constexpr int kGroup = 8;   // of them, those between two looks at the earlier walk

// ratio * (1 - probability), a stand-in for the norm of the token's score gradient, as accurate as T.
__device__ __forceinline__ double token_weight(double logprob, double old_logprob) {
  return exp(fmin(fmax(logprob - old_logprob, -kMaxLogRatio), kMaxLogRatio)) * -expm1(fmin(logprob, 0.0));
}
__device__ __forceinline__ float token_weight(float logprob, float old_logprob) {
  constexpr float kMax = static_cast<float>(kMaxLogRatio);
  return expf(fminf(fmaxf(logprob - old_logprob, -kMax), kMax)) * -expm1f(fminf(logprob, 0.0f));
}

// The tokens of a tile as the threads that cut it read them, each a chunk of neighbouring tokens.
template <int kThreads>
struct CutTile {
  static constexpr int kTokens = kThreads * kItems, kChunks = kTokens / kChunk;
  // token k of chunk c is at [k][c]; without the last column, threads would write to the same banks
  double advantages[kChunk][kChunks + 1];
  double weights[kChunk][kChunks + 1];
  unsigned valid[kChunks], firsts[kChunks];  // a bit for each token: whether it counts, and is the first of a segment
  OpenSegment carried, ends[kChunks];        // the open segment before the tile, and after each chunk
};

__device__ __forceinline__ bool is_same(const OpenSegment& a, const OpenSegment& b) {
  return a.length == b.length && (a.length == 0 || (__double_as_longlong(a.sums.p) == __double_as_longlong(b.sums.p) &&
                                                    __double_as_longlong(a.sums.q) == __double_as_longlong(b.sums.q)));
}

// The token of a chunk to begin with before the open segment is known: the one after a gap; else the one that is the
// first of a segment if all segments since the last gap have max_size tokens; else the chunk's first. All lanes of the
// warp must call it.
template <int kThreads>
__device__ int guess_first(const CutTile<kThreads>& tile, int chunk, int max_size) {
  unsigned long long is_full = 0;  // a bit for each chunk
  for (int first = 0; first < tile.kChunks; first += kWarp) {
    const bool is_chunk = first + lane() < tile.kChunks;
    const unsigned all = __ballot_sync(kAllLanes, is_chunk && tile.valid[is_chunk ? first + lane() : 0] == kAllLanes);
    is_full |= static_cast<unsigned long long>(all) << first;
  }
  if (chunk >= tile.kChunks) return 0;
  const unsigned long long with_gap = ~is_full & ((1ull << chunk) - 1);
  int before = tile.carried.length + chunk * kChunk;  // tokens since the last gap
  if (with_gap != 0) {
    const int last = 63 - __clzll(static_cast<long long>(with_gap));
    before = (chunk - last - 1) * kChunk + __clz(static_cast<int>(~tile.valid[last]));
  }
  if (max_size > kChunk) return 0;
  const unsigned size = static_cast<unsigned>(max_size), over = static_cast<unsigned>(before) % size;
  const int guess = over == 0 ? 0 : static_cast<int>(size - over);
  const unsigned gaps = ~tile.valid[chunk];
  const int gap = gaps == 0 ? kChunk : __ffs(static_cast<int>(gaps)) - 1;
  return guess < gap ? guess : gap;
}

// Cuts the tile, whose first token follows `carried`, with the sums in the order of cut_row. Each thread walks along
// its chunk from a guess, and again whenever the thread before it finds another open segment, until it meets its last
// walk: where both have a gap or the first token of a segment, the rest is the same. With segments of 8 tokens this
// takes about three walks; at worst, where none ends in a chunk and the guess does not hold, as many as there are
// chunks.
template <bool kIsBounded, bool kIsCoherent, int kThreads>
__device__ void cut_tile(CutTile<kThreads>& tile, const CutRule& rule) {
  constexpr int kStride = CutTile<kThreads>::kChunks + 1;
  const int chunk = static_cast<int>(threadIdx.x);
  const bool is_cutting = chunk < tile.kChunks;
  int begin = 0;
  if (chunk / kWarp * kWarp < tile.kChunks) begin = guess_first(tile, chunk, rule.max_size);
  const unsigned valid = is_cutting ? tile.valid[chunk] : 0;
  // the tokens that count in the next walk, in the first those from the guess on
  unsigned tokens = valid & (~0u << begin), firsts = 0;
  OpenSegment entry{{0, 0}, 0}, end{{0, 0}, 0};
  if (chunk == 0) entry = tile.carried, tokens = valid;
  bool is_walking = is_cutting, is_known = false;  // whether there is an earlier walk
  bool has_entry = chunk == 0;
  for (;;) {
    bool has_changed = false;
    if (is_walking) {
      OpenSegment open = entry;
      unsigned found = 0;
      bool has_met = false;
      for (int group = 0; group < kChunk && !has_met; group += kGroup) {
        const double* const advantages = &tile.advantages[group][chunk];
        const double* const weights = &tile.weights[group][chunk];
        const unsigned group_tokens = tokens >> group;
        unsigned group_firsts = 0;
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
          const double advantage = advantages[j * kStride];
          const VarianceTerms own = variance_terms(kIsCoherent, advantage, weights[j * kStride]);
          const bool is_first = open.template add<kIsBounded, kIsCoherent>(rule, advantage, own);
          if ((group_tokens >> j & 1) == 0) open.length = 0;
          group_firsts |= (is_first ? 1u : 0u) << j;
        }
        group_firsts &= group_tokens;
        found |= group_firsts << group;
        const unsigned meetings = ~group_tokens | (group_firsts & firsts >> group);
        has_met = is_known && (meetings & ((1u << kGroup) - 1)) != 0;
        if (has_met) found |= firsts & (~0u << group << (kGroup - 1) << 1);
      }
      firsts = found;
      if (!has_met) {
        has_changed = !is_known || !is_same(open, end);
        end = open;
      }
      tokens = valid;
      tile.firsts[chunk] = firsts;
      if (has_changed) tile.ends[chunk] = end;
      is_known = true;
    }
    if (!__syncthreads_or(has_changed)) break;
    is_walking = false;
    if (is_cutting && chunk > 0) {
      const OpenSegment next = tile.ends[chunk - 1];
      is_walking = !has_entry || !is_same(next, entry);
      has_entry = true;
      entry = next;
    }
    __syncthreads();
  }
  if (chunk == tile.kChunks - 1) tile.carried = end;
}

// The number of segments that begin in the tile before the thread's tokens, of which `own` are first tokens; sets
// `whole` to the number in all of the tile.
template <int kThreads>
__device__ __forceinline__ int firsts_before(const CutTile<kThreads>& tile, unsigned own, int& whole) {
  constexpr int kChunksPerWarp = kWarp * kItems / kChunk;
  const int first_chunk = static_cast<int>(threadIdx.x) / kWarp * kChunksPerWarp;
  int before_warp = 0, all = 0;
#pragma unroll
  for (int first = 0; first < tile.kChunks; first += kWarp) {
    const int chunk = first + lane();
    const int count = chunk < tile.kChunks ? __popc(tile.firsts[chunk < tile.kChunks ? chunk : 0]) : 0;
    all += count;
    before_warp += chunk < first_chunk ? count : 0;
  }
  whole = __reduce_add_sync(kAllLanes, all);
  int before = __popc(own);
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const int other = __shfl_up_sync(kAllLanes, before, offset);
    if (lane() >= offset) before += other;
  }
  return before - __popc(own) + __reduce_add_sync(kAllLanes, before_warp);
}

}  // namespace
}  // namespace grpo_kernels
