#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "common/allocate.h"
#include "common/op_namespace.h"
#include "common/parallel.h"
#include "common/scratch.h"
#include "common/simd/levels.h"
#include "common/tensors.h"
#include "linear_head/divergence.h"
#include "linear_head/half_product.h"

#if !defined(GRPO_AMX)
// Without the compiler's support, which half_products_here() says.
namespace grpo_kernels::amx {
bool is_available() { return false; }
int64_t workspace_bytes(const HalfProduct&, Range, Range) { return 0; }
void multiply(const HalfProduct&, Range, Range, void*) {}
}  // namespace grpo_kernels::amx
#endif

namespace grpo_kernels {
namespace {

constexpr const char* kOp = "half_product";
constexpr double kFlopsPerNanosecond = 500;  // of one thread
constexpr const char* kDivergence = "divergence_rows";

HalfFactor factor_of(const char* name, const Tensor& tensor, int64_t lanes, int64_t lane_dim) {
  GRPO_CHECK(tensor.dim() == 2 && tensor.scalar_type() == ScalarType::BFloat16, kOp, ": ", name,
             " must be a matrix of bfloat16");
  const int64_t lane_stride = tensor.stride(lane_dim), depth_stride = tensor.stride(1 - lane_dim);
  GRPO_CHECK(lane_stride == 1 || depth_stride == 1 || tensor.numel() == 1, kOp, ": ", name, " must have a stride of 1");
  GRPO_CHECK(tensor.size(lane_dim) == lanes, kOp, ": ", name, " must have the shape of the product, got ",
             tensor.size(lane_dim), " of ", lanes, " lanes");
  return {static_cast<const uint16_t*>(tensor.const_data_ptr()), lane_stride, depth_stride};
}

// How many parts of rows and of columns the threads compute. A part of rows packs all columns again.
std::pair<int64_t, int64_t> parts_of(int64_t rows, int64_t columns, int64_t threads) {
  std::pair<int64_t, int64_t> best{1, threads};
  for (int64_t parts = 2; parts <= threads; ++parts) {
    if (threads % parts != 0) continue;
    const auto packed = [&](int64_t by_rows) { return rows * (threads / by_rows) + columns * by_rows; };
    if (packed(parts) < packed(best.first)) best = {parts, threads / parts};
  }
  return best;
}

Range part_of(int64_t lanes, int64_t index, int64_t parts) {
  const int64_t panels = (lanes + amx::kPanel - 1) / amx::kPanel;
  return {panels * index / parts * amx::kPanel, std::min(lanes, panels * (index + 1) / parts * amx::kPanel)};
}

// Checked rows of logits [N, V] of one model.
struct LogitMatrix {
  const float* data;
  int64_t row_stride;
  const double* normalizers;
  const float* temperatures;  // null: `temperature` for all rows
  double temperature, softcap, logit_scale;

  LogitRow row(int64_t row) const {
    const double divisor = temperatures == nullptr ? temperature : static_cast<double>(temperatures[row]);
    return {data + row * row_stride, make_logit_map<float>(divisor, softcap, logit_scale), normalizers[row]};
  }
};

void check_matrix(const char* name, const Tensor& tensor, int64_t rows, int64_t columns, bool may_be_half) {
  const bool is_half = may_be_half && tensor.scalar_type() == ScalarType::BFloat16;
  GRPO_CHECK(tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == columns && tensor.stride(1) == 1 &&
                 (is_half || tensor.scalar_type() == ScalarType::Float),
             kDivergence, ": ", name, " must be ", may_be_half ? "float32 or bfloat16" : "float32", " [", rows, ", ",
             columns, "] with whole rows");
}

// The divergence of a row, and its gradient where `gradient` is not null. A row of share 0 has neither.
template <typename G>
double visit_row(const DivergenceRow& row, G* gradient) {
  if (row.share == 0) {
    if (gradient != nullptr) std::fill_n(gradient, row.columns, G{});
    return 0;
  }
  return gradient == nullptr ? GRPO_SIMD_CALL(row_divergence, row)
                             : GRPO_SIMD_CALL(divergence_row_gradient, row, gradient);
}

}  // namespace

const char* half_products_here() {
  static const bool is_available = amx::is_available();
  return is_available ? "amx" : "none";
}

// out = a @ b, or out += a @ b, with exact products and float32 sums.
void half_product_cpu(Tensor out, Tensor a, Tensor b, bool add) {
  GRPO_CHECK(half_products_here() == std::string_view("amx"), kOp, ": this machine must have AMX units, got none");
  const bool is_half = out.scalar_type() == ScalarType::BFloat16;
  GRPO_CHECK(out.dim() == 2 && (out.stride(1) == 1 || out.size(1) <= 1), kOp, ": out must be a matrix of whole rows");
  GRPO_CHECK(is_half ? !add : out.scalar_type() == ScalarType::Float, kOp,
             ": out must be float32, or bfloat16 without add");
  GRPO_CHECK(a.size(1) == b.size(0) && a.size(1) > 0, kOp, ": a and b must have one depth above 0, got ", a.size(1),
             " and ", b.size(0));
  const int64_t rows = out.size(0), columns = out.size(1), depth = a.size(1);
  const HalfProduct product{factor_of("a", a, rows, 0),
                            factor_of("b", b, columns, 1),
                            depth,
                            out.mutable_data_ptr(),
                            out.stride(0),
                            is_half,
                            add};
  if (rows == 0 || columns == 0) return;
  const double flops = 2.0 * static_cast<double>(rows) * static_cast<double>(columns) * static_cast<double>(depth);
  const auto [row_parts, column_parts] = parts_of(rows, columns, threads_for(flops / kFlopsPerNanosecond));
  divide(row_parts * column_parts, row_parts * column_parts,
         [&, by_columns = column_parts, by_rows = row_parts](int64_t begin, int64_t end) {
           static thread_local Scratch<char> workspace;
           for (int64_t part = begin; part < end; ++part) {
             const Range own_rows = part_of(rows, part / by_columns, by_rows);
             const Range own_columns = part_of(columns, part % by_columns, by_columns);
             if (own_rows.begin >= own_rows.end || own_columns.begin >= own_columns.end) continue;
             amx::multiply(product, own_rows, own_columns,
                           workspace.get(amx::workspace_bytes(product, own_rows, own_columns)));
           }
         });
}

// Divergences of rows of the student's logits from the teacher's, and the gradient by the student's logits, which may
// overwrite them; no gradient where that has no elements.
Tensor divergence_rows_cpu(Tensor gradient, Tensor student, Tensor teacher, Tensor student_normalizer,
                           Tensor teacher_normalizer, Tensor shares, std::optional<Tensor> row_temperature,
                           double temperature, std::optional<double> softcap, double logit_scale,
                           std::optional<double> teacher_softcap, double teacher_logit_scale, int64_t kind,
                           double beta) {
  const int64_t rows = student.size(0), columns = student.size(1);
  check_matrix("student", student, rows, columns, false);
  check_matrix("teacher", teacher, rows, columns, false);
  const bool wants_gradient = gradient.numel() > 0, is_half = gradient.scalar_type() == ScalarType::BFloat16;
  if (wants_gradient) check_matrix("gradient", gradient, rows, columns, true);
  check_array(kDivergence, "student_normalizer", student_normalizer, rows, ScalarType::Double);
  check_array(kDivergence, "teacher_normalizer", teacher_normalizer, rows, ScalarType::Double);
  check_array(kDivergence, "shares", shares, rows, ScalarType::Double);
  check_array(kDivergence, "row_temperature", row_temperature, rows, ScalarType::Float);
  const auto matrix = [&](const Tensor& logits, const Tensor& normalizer, std::optional<double> cap, double scale) {
    return LogitMatrix{static_cast<const float*>(logits.const_data_ptr()),
                       logits.stride(0),
                       static_cast<const double*>(normalizer.const_data_ptr()),
                       optional_data<float>(row_temperature),
                       temperature,
                       cap.value_or(0),
                       scale};
  };
  const LogitMatrix own = matrix(student, student_normalizer, softcap, logit_scale);
  const LogitMatrix its = matrix(teacher, teacher_normalizer, teacher_softcap, teacher_logit_scale);
  const Tensor values = empty_tensor(student, &rows, 1, aoti_torch_dtype_float64());
  const auto visit_rows = [&](auto* to) {
    const double nanoseconds = static_cast<DivergenceKind>(kind) == DivergenceKind::kJsd ? 3 : 1;  // a column
    parallel_for(rows, nanoseconds * static_cast<double>(columns), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const DivergenceRow input{own.row(row),
                                  its.row(row),
                                  columns,
                                  static_cast<DivergenceKind>(kind),
                                  static_cast<float>(beta),
                                  static_cast<const double*>(shares.const_data_ptr())[row]};
        data_of<double>(values)[row] = visit_row(input, to == nullptr ? to : to + row * gradient.stride(0));
      }
    });
  };
  if (is_half) {
    visit_rows(data_of<BFloat16>(gradient));
  } else {
    visit_rows(wants_gradient ? data_of<float>(gradient) : nullptr);
  }
  return values;
}

}  // namespace grpo_kernels

STABLE_TORCH_LIBRARY_IMPL(GRPO_NAMESPACE, CPU, library) {
  library.impl("_half_product_cpu", TORCH_BOX(&grpo_kernels::half_product_cpu));
  library.impl("divergence_rows", TORCH_BOX(&grpo_kernels::divergence_rows_cpu));
}
