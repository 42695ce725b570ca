#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "policy_loss/batch.h"

// Which tokens Clip-Cov and KL-Cov choose: the `count` tokens of the largest keys, the first of equal ones.
namespace grpo_kernels {

struct SelectionCandidate {
  double key;
  int64_t token;  // of the batch
};

// Keeps the best of the candidates that it is given in ascending order of their tokens, in memory for twice as many.
class Selection {
 public:
  explicit Selection(int64_t count) : count_(count) {}

  void add(SelectionCandidate candidate) {
    if (std::isnan(candidate.key)) candidate.key = -INFINITY;
    if (!takes(candidate.key)) return;
    candidates_.push_back(candidate);
    if (static_cast<int64_t>(candidates_.size()) >= 2 * count_ + kRoom) prune();
  }

  bool takes(double key) const { return !is_full_ || key > least_; }

  // Keys that are not larger have no chance.
  double least() const { return least_; }

  void add(const Selection& other) {
    candidates_.insert(candidates_.end(), other.candidates_.begin(), other.candidates_.end());
  }

  // The chosen ones, in any order.
  const std::vector<SelectionCandidate>& prune() {
    if (static_cast<int64_t>(candidates_.size()) <= count_) return candidates_;
    const auto comes_first = [](const SelectionCandidate& a, const SelectionCandidate& b) {
      return a.key != b.key ? a.key > b.key : a.token < b.token;
    };
    std::nth_element(candidates_.begin(), candidates_.begin() + (count_ - 1), candidates_.end(), comes_first);
    candidates_.resize(count_);
    least_ = candidates_.back().key;
    is_full_ = true;
    return candidates_;
  }

 private:
  static constexpr int64_t kRoom = 1024;
  const int64_t count_;
  double least_ = -INFINITY;
  bool is_full_ = false;
  std::vector<SelectionCandidate> candidates_;
};

// As _hash in ops/policy_loss/covariance.py: of a token's place among the valid ones, from 1 on, and of its log-prob.
inline uint32_t selection_hash(float logprob, int64_t place) {
  uint32_t bits;
  std::memcpy(&bits, &logprob, sizeof bits);
  uint32_t value = bits ^ static_cast<uint32_t>(static_cast<uint64_t>(place) * 0x9E3779B1u);
  for (const uint32_t factor : {0x45D9F3Bu, 0x119DE1F3u}) value = (value ^ (value >> 16)) * factor;
  return value ^ (value >> 16);
}

// Whether PPO's clipping changes the term of a token.
template <typename T>
bool is_clipped(T logprob, T old_logprob, T advantage, T low, T high) {
  const T ratio = std::exp(logprob - old_logprob);
  return -advantage * std::min(std::max(ratio, low), high) > -advantage * ratio;
}

}  // namespace grpo_kernels
