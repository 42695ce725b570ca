#pragma once

#include <sstream>
#include <stdexcept>

namespace grpo_kernels {

template <typename... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

}  // namespace grpo_kernels

// Raises a RuntimeError with these parts as its message. STD_TORCH_CHECK would precede it with a place in our sources.
// A macro, because parts may be undefined where the condition holds.
#define GRPO_CHECK(condition, ...)         \
  do {                                     \
    if (!(condition)) [[unlikely]] {       \
      ::grpo_kernels::refuse(__VA_ARGS__); \
    }                                      \
  } while (false)
