// Compiled for Intel AMX on every machine, and called where amx::is_available(). Use only C headers and always-inlined
// functions here: the linker could merge an inline function of the standard library with a copy built without AMX.
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "linear_head/half_product.h"

// A tile unit multiplies 16 rows of 32 halves by 16 columns of 32, and adds to 16 x 16 floats. Four of these sums stay
// in tiles, those of a panel of 32 rows and one of 32 columns, so that a step loads four tiles for four products.
// Panels are packed for it. One factor's panels are kept in the L2 cache while those of the other pass by, each packed
// once and multiplied by all that are kept.
namespace grpo_kernels::amx {
namespace {

constexpr int64_t kTile = 512;      // halves of a tile, and half of what a panel has of a step
constexpr int64_t kStep = 32;       // depth of a tile
constexpr int64_t kDepth = 1024;    // depth that is packed at a time
constexpr int64_t kKept = 512;      // lanes that are kept: 1 MiB
constexpr int64_t kGroup = 256;     // lanes that are packed at a time of those that pass by
constexpr int64_t kPassing = 1024;  // lanes that pass by before deeper ones are kept: 2 MiB of sums
constexpr int64_t kSums = 32 * 32;  // of two panels, in four tiles

#define GRPO_INLINE [[gnu::always_inline]] inline

GRPO_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
GRPO_INLINE int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// The least number of equal blocks of at most `most` lanes, in whole panels.
GRPO_INLINE int64_t block_lanes(int64_t lanes, int64_t most) {
  const int64_t blocks = (lanes + most - 1) / most;
  return round_up((lanes + blocks - 1) / blocks, kPanel);
}

// Sixteen vectors of sixteen pairs, transposed.
GRPO_INLINE void transpose(__m512i (&x)[16]) {
  __m512i y[16];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
      x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
    }
  }
  for (int j = 0; j < 4; ++j) {
    const __m512i even_low = _mm512_shuffle_i32x4(x[j], x[j + 4], 0x88),
                  odd_low = _mm512_shuffle_i32x4(x[j], x[j + 4], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(x[j + 8], x[j + 12], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(x[j + 8], x[j + 12], 0xdd);
    y[j] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    y[j + 8] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
    y[j + 4] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    y[j + 12] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  }
  for (int i = 0; i < 16; ++i) x[i] = y[i];
}

// The first `count` of 32 halves; 0 in the others.
GRPO_INLINE __m512i load_halves(const uint16_t* from, int64_t count) {
  if (count >= 32) return _mm512_loadu_si512(from);
  return _mm512_maskz_loadu_epi16(count <= 0 ? 0 : (1u << count) - 1, from);
}
GRPO_INLINE __m512i load_wide(const uint16_t* from, int64_t count) {
  if (count >= 16) return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(count <= 0 ? 0 : (1u << count) - 1, from));
}

// A tile: a vector of 32 halves of depth for each of 16 lanes, or, as pairs, a vector of 16 lanes for each two of
// depth.
template <bool kAsPairs>
GRPO_INLINE void pack_tile(const HalfFactor& factor, int64_t lane, int64_t end_lane, int64_t depth, int64_t end,
                           uint16_t* to) {
  const int64_t lanes = end_lane - lane;
  const uint16_t* const from = factor.data + lane * factor.lane_stride + depth * factor.depth_stride;
  const bool is_pairs = factor.depth_stride != 1;
  __m512i vectors[16];
  for (int i = 0; i < 16; ++i) {
    if (is_pairs) {
      const __m512i low = 2 * i < end - depth ? load_wide(from + 2 * i * factor.depth_stride, lanes) : __m512i{};
      const __m512i high =
          2 * i + 1 < end - depth ? load_wide(from + (2 * i + 1) * factor.depth_stride, lanes) : __m512i{};
      vectors[i] = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    } else {
      vectors[i] = i < lanes ? load_halves(from + i * factor.lane_stride, end - depth) : __m512i{};
    }
  }
  if (is_pairs != kAsPairs) transpose(vectors);
  for (int i = 0; i < 16; ++i) _mm512_store_si512(to + 32 * i, vectors[i]);
}

// Panels one after the other, of a step after the other. Reads whole rows of the matrix, or a long piece of each.
template <bool kAsPairs>
void pack_panels(const HalfFactor& factor, Range lanes, Range depth, uint16_t* panels) {
  const int64_t panel_halves = round_up(depth.end - depth.begin, kStep) * kPanel;
  const auto pack = [&](int64_t lane, int64_t d) {
    uint16_t* const to = panels + (lane - lanes.begin) / kPanel * panel_halves + (d - depth.begin) * kPanel;
    pack_tile<kAsPairs>(factor, lane, lanes.end, d, depth.end, to);
    pack_tile<kAsPairs>(factor, lane + 16, lanes.end, d, depth.end, to + kTile);
  };
  if (factor.depth_stride == 1) {
    for (int64_t lane = lanes.begin; lane < lanes.end; lane += kPanel) {
      for (int64_t d = depth.begin; d < depth.end; d += kStep) pack(lane, d);
    }
  } else {
    for (int64_t d = depth.begin; d < depth.end; d += kStep) {
      for (int64_t lane = lanes.begin; lane < lanes.end; lane += kPanel) pack(lane, d);
    }
  }
}

// Adds the product of two panels to their sums, or writes it.
GRPO_INLINE void multiply_panels(const uint16_t* a, const uint16_t* b, int64_t steps, float* sums, bool is_first) {
  // the intrinsics of some compilers do not say that they read memory
  __asm__ volatile("" ::: "memory");
  if (is_first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + 256, 64);
    _tile_loadd(2, sums + 512, 64);
    _tile_loadd(3, sums + 768, 64);
  }
  for (int64_t step = 0; step < steps; ++step, a += 2 * kTile, b += 2 * kTile) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + kTile, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + kTile, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  _tile_stored(2, sums + 512, 64);
  _tile_stored(3, sums + 768, 64);
  __asm__ volatile("" ::: "memory");
}

// The first rows and columns of these ranges, at most a panel of each.
GRPO_INLINE void write_sums(const HalfProduct& product, const float* sums, Range rows, Range columns) {
  for (int64_t column = columns.begin; column < smaller(columns.end, columns.begin + kPanel); column += 16) {
    const int64_t count = columns.end - column, half = column - columns.begin;
    const __mmask16 mask = count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1);
    for (int64_t row = rows.begin; row < smaller(rows.end, rows.begin + kPanel); ++row) {
      const int64_t r = row - rows.begin;
      __m512 values = _mm512_load_ps(sums + (r / 16 * 2 + half / 16) * 256 + r % 16 * 16);
      const int64_t place = row * product.out_stride + column;
      if (product.is_half) {
        const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(values);
        _mm256_mask_storeu_epi16((uint16_t*)product.out + place, mask, rounded);
        continue;
      }
      float* const to = (float*)product.out + place;
      if (product.is_sum) values = _mm512_add_ps(values, _mm512_maskz_loadu_ps(mask, to));
      _mm512_mask_storeu_ps(to, mask, values);
    }
  }
}

template <typename Visit>
GRPO_INLINE void for_blocks(Range range, int64_t size, const Visit& visit) {
  for (int64_t begin = range.begin; begin < range.end; begin += size)
    visit(Range{begin, smaller(begin + size, range.end)});
}

struct Blocks {
  int64_t kept_lanes, passing_lanes, depth;
  bool is_deep;  // the sums of a block wait for the next depth; otherwise those of two panels are complete

  GRPO_INLINE Blocks(Range kept, Range passing, int64_t all_depth)
      : kept_lanes(block_lanes(kept.end - kept.begin, kKept)),
        passing_lanes(block_lanes(passing.end - passing.begin, kPassing)),
        depth(smaller(round_up(all_depth, kStep), kDepth)),
        is_deep(all_depth > kDepth) {}

  GRPO_INLINE int64_t bytes() const {
    return 2 * depth * (kept_lanes + kGroup) + 4 * (is_deep ? kept_lanes * passing_lanes : kSums);
  }
};

template <bool kKeepsRows>
void multiply_in_blocks(const HalfProduct& product, Range kept_range, Range passing_range, void* workspace) {
  const HalfFactor &kept = kKeepsRows ? product.a : product.b, &passing = kKeepsRows ? product.b : product.a;
  const Blocks blocks(kept_range, passing_range, product.depth);
  uint16_t* const kept_panels = (uint16_t*)workspace;
  uint16_t* const passing_panels = kept_panels + blocks.kept_lanes * blocks.depth;
  float* const all_sums = (float*)(passing_panels + kGroup * blocks.depth);

  const auto multiply_group = [&](Range kept_lanes, Range group, Range depth, float* sums) {
    const int64_t steps = (depth.end - depth.begin + kStep - 1) / kStep;
    pack_panels<kKeepsRows>(passing, group, depth, passing_panels);
    for (int64_t lane = group.begin; lane < group.end; lane += kPanel) {
      const uint16_t* const own = passing_panels + (lane - group.begin) * steps * kStep;
      for (int64_t other = kept_lanes.begin; other < kept_lanes.end; other += kPanel) {
        const uint16_t* const its = kept_panels + (other - kept_lanes.begin) * steps * kStep;
        multiply_panels(kKeepsRows ? its : own, kKeepsRows ? own : its, steps, sums, depth.begin == 0);
        if (depth.end == product.depth) {
          const Range others{other, kept_lanes.end}, lanes{lane, group.end};
          write_sums(product, sums, kKeepsRows ? others : lanes, kKeepsRows ? lanes : others);
        }
        if (!blocks.is_deep) continue;
        sums += kSums;
      }
    }
  };
  for_blocks(kept_range, blocks.kept_lanes, [&](Range kept_lanes) {
    for_blocks(passing_range, blocks.passing_lanes, [&](Range passing_lanes) {
      for_blocks({0, product.depth}, blocks.depth, [&](Range depth) {
        if (blocks.is_deep || passing_lanes.begin == passing_range.begin) {
          pack_panels<!kKeepsRows>(kept, kept_lanes, depth, kept_panels);
        }
        for_blocks(passing_lanes, kGroup, [&](Range group) {
          const int64_t before =
              (group.begin - passing_lanes.begin) * round_up(kept_lanes.end - kept_lanes.begin, kPanel);
          multiply_group(kept_lanes, group, depth, all_sums + (blocks.is_deep ? before : 0));
        });
      });
    });
  });
}

GRPO_INLINE bool keeps_rows(Range rows, Range columns) { return rows.end - rows.begin <= columns.end - columns.begin; }

}  // namespace

bool is_available() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  const bool has_tiles = (d >> 24 & 1) != 0 && (d >> 22 & 1) != 0;  // AMX-TILE and AMX-BF16
  const bool has_vectors = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!has_tiles || !has_vectors || __get_cpuid_count(7, 1, &a, &b, &c, &d) == 0 || (a >> 5 & 1) == 0) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

int64_t workspace_bytes(const HalfProduct& product, Range rows, Range columns) {
  const bool is_rows = keeps_rows(rows, columns);
  return Blocks(is_rows ? rows : columns, is_rows ? columns : rows, product.depth).bytes();
}

void multiply(const HalfProduct& product, Range rows, Range columns, void* workspace) {
  struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } const shapes;
  _tile_loadconfig(&shapes);
  if (keeps_rows(rows, columns)) {
    multiply_in_blocks<true>(product, rows, columns, workspace);
  } else {
    multiply_in_blocks<false>(product, columns, rows, workspace);
  }
  _tile_release();
}

}  // namespace grpo_kernels::amx
