#pragma once

#include <stddef.h>
#include <stdint.h>

#include "common/host_device.h"

// Settings travel from Python as doubles, of which the first are modes, integers, and the others coefficients. An op
// lists its own once, in Python's order, as a macro LIST(MODE, COEFFICIENT) of MODE(type, name) followed by
// COEFFICIENT(name); GRPO_SETTINGS(Settings, LIST) in the body of struct Settings declares the fields, their number and
// names, and from(numbers).
#define GRPO_SETTINGS(Settings, LIST)                                                                        \
  LIST(GRPO_MODE_FIELD, GRPO_COEFFICIENT_FIELD)                                                              \
  static constexpr size_t kSettings = 0 LIST(GRPO_MODE_COUNT, GRPO_COEFFICIENT_COUNT);                       \
  static constexpr const char* kModeNames = LIST(GRPO_MODE_NAME, GRPO_NO_COEFFICIENT);                       \
  static constexpr const char* kCoefficientNames = LIST(GRPO_NO_MODE, GRPO_COEFFICIENT_NAME);                \
  static GRPO_HD Settings from(const double* numbers) {                                                      \
    return {LIST(GRPO_READ_MODE, GRPO_READ_COEFFICIENT)}; /* braces evaluate their elements left to right */ \
  }
#define GRPO_MODE_FIELD(type, name) type name;
#define GRPO_COEFFICIENT_FIELD(name) double name;
#define GRPO_MODE_COUNT(type, name) +1
#define GRPO_COEFFICIENT_COUNT(name) +1
#define GRPO_MODE_NAME(type, name) #name " "
#define GRPO_COEFFICIENT_NAME(name) #name " "
#define GRPO_READ_MODE(type, name) static_cast<type>(*numbers++),
#define GRPO_READ_COEFFICIENT(name) *numbers++,
#define GRPO_NO_MODE(type, name)
#define GRPO_NO_COEFFICIENT(name)

// An enumeration whose values are positions in a tuple of names in Python, and the enumerators' names for a test that
// compares the two.
#define GRPO_CODES(Enum, type, ...)       \
  enum class Enum : type { __VA_ARGS__ }; \
  constexpr const char* k##Enum##Names = #__VA_ARGS__
