#!/usr/bin/env bash
# Builds the wheel of every build mode and the sdist, installs each wheel into a fresh environment, and runs the op
# tests against it from outside the checkout. Uses the packages of .venv to build (make test makes it).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PATH="$root/.venv/bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1

# From the sdist, so that what it lacks is found here.
git -C "$root" archive --format=tar HEAD | (mkdir "$work/source" && tar -x -C "$work/source")
(cd "$work/source" && GRPO_KERNELS_BUILD=none python setup.py -q sdist -d "$work/sdist" >/dev/null)
cp -r "$root/tests" "$work/tests"
modes="none cpu"
if command -v nvcc >/dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; then modes="$modes cuda"; fi

# One architecture will do here: tests/test_cuda_compile.py compiles the kernels for the others.
export CMAKE_ARGS=${CMAKE_ARGS:--DGRPO_CUDA_ARCHITECTURES=90-real}

for mode in $modes; do
  echo "== wheel: GRPO_KERNELS_BUILD=$mode"
  GRPO_KERNELS_BUILD=$mode python -m pip wheel -q --no-build-isolation --no-deps -w "$work/$mode" "$work"/sdist/*.tar.gz
  wheel=$(ls "$work/$mode"/*.whl)
  basename "$wheel"
  python - "$wheel" "$mode" <<'PY'
import sys, zipfile
names = zipfile.ZipFile(sys.argv[1]).namelist()
mode = sys.argv[2]
compiled = sorted(name.split("/")[1].split(".")[0] for name in names if name.endswith(".so"))
assert compiled == {"none": [], "cpu": ["_C"], "cuda": ["_C", "_C_cuda"]}[mode], compiled
assert {name.split("/")[0] for name in names if name.endswith("__init__.py")} == {"grpo_kernels", "grpo_trainer"}, names
assert "grpo_kernels/py.typed" in names
assert (mode == "none") == sys.argv[1].endswith("py3-none-any.whl"), sys.argv[1]
PY
  # a source file that the build forgot would show where the module is loaded, which without a GPU it is not
  mkdir "$work/content-$mode" && python -m zipfile -e "$wheel" "$work/content-$mode"
  for module in $(find "$work/content-$mode" -name "*.so"); do
    missing=$(nm -D --undefined-only --demangle "$module" | grep "grpo_kernels::" || true)
    if [ -n "$missing" ]; then echo "$module lacks: $missing" >&2; exit 1; fi
  done
  # torch brings CUDA but for the runtime, which is our own (see CMakeLists.txt) and must not replace anybody else's
  for module in "$work/content-$mode"/grpo_kernels/_C_cuda*.so; do
    [ -e "$module" ] || continue
    needed=$(readelf -d "$module" | grep NEEDED)
    grep -q "\[libtorch_cuda.so\]" <<<"$needed" || { echo "$module does not need libtorch_cuda.so" >&2; exit 1; }
    if grep cudart <<<"$needed" >&2; then echo "$module needs a CUDA runtime" >&2; exit 1; fi
    if readelf -d "$module" | grep -E "R(UN)?PATH" >&2; then echo "$module has a path of this machine" >&2; exit 1; fi
    if nm -D --defined-only "$module" | grep -E " _*cuda" >&2; then echo "$module exports CUDA's runtime" >&2; exit 1; fi
  done
  python -m venv "$work/env-$mode"
  python_there="$work/env-$mode/bin/python"
  "$python_there" -m pip install -q -c "$root/tools/constraints.txt" torch==2.13.0 triton==3.7.1 numpy pytest pytest-xdist hypothesis
  "$python_there" -m pip install -q --no-deps "$wheel"
  # not what make test has gone through already at length: large grids, and the peers, which are not installed here
  tests=tests/ops
  if [ "$mode" = cuda ] && ! nvidia-smi -L >/dev/null 2>&1; then tests=tests/ops/test_group_advantages.py; fi
  (cd "$work" && "$python_there" -m grpo_kernels && "$python_there" -m pytest -q -p no:cacheprovider -n auto \
    -m "not slow and not grid" --ignore-glob="*_parity*.py" "$tests")
  rm -rf "$work/env-$mode"
done
