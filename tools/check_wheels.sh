#!/usr/bin/env bash
# Builds the sdist and, from it, the wheel of every build mode against the torch of .venv; installs each wheel in
# .venv-floor, which has the oldest torch and Triton supported; and runs the op tests there, outside the checkout.
#
#   bash tools/check_wheels.sh          all of it; also runs a wheel built against the oldest torch under that of .venv
#   bash tools/check_wheels.sh quick    one wheel, built against the oldest torch; an import and the calls of every op that
#                                       a version may break
#
# CUDA kernels are compiled if there is nvcc, for one architecture.
#
# `make test-floor` and `make test-floor-quick` prepare both environments.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
quick=${1:-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1
newest="$root/.venv/bin/python"
oldest="$root/.venv-floor/bin/python"
torch_dir() { "$1" -c 'import os, torch; print(os.path.dirname(torch.__file__))'; }

# build_wheel PYTHON TORCH_DIR MODE FOLDER. Every mode builds in the same tree, so the CPU kernels are compiled once.
build_wheel() {
  env PATH="$(dirname "$1"):$PATH" GRPO_KERNELS_BUILD="$3" CMAKE_ARGS="${CMAKE_ARGS:-} -DTORCH_DIR=$2" \
    "$1" -m pip wheel -q --no-build-isolation --no-deps -w "$4" "$work/unpacked"
}

# run_tests PYTHON. The peers are not installed here.
run_tests() {
  (cd "$work" && "$@" -m pytest -p no:cacheprovider -W "ignore:Conversion of an array:DeprecationWarning" \
    -n auto --ignore-glob="*parity*.py" --ignore-glob="*peers*.py" "${tests[@]}")
}

git -C "$root" archive --format=tar HEAD | (mkdir "$work/source" && tar -x -C "$work/source")
(cd "$work/source" && GRPO_KERNELS_BUILD=none "$newest" setup.py -q sdist -d "$work/sdist" >/dev/null)
# The wheels come from the sdist, so a file that it lacks fails here.
mkdir "$work/unpacked" && tar -xf "$work"/sdist/*.tar.gz -C "$work/unpacked" --strip-components=1
cp -r "$root/tests" "$root/pyproject.toml" "$work"

modes="none cpu"
if command -v nvcc >/dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; then modes="$modes cuda"; fi
export CMAKE_ARGS="-DGRPO_CUDA_ARCHITECTURES=90-real"  # `make dist` compiles for all
against=$newest
if [ "$quick" ]; then
  modes=${modes##* }
  against=$oldest  # a GPU machine compiles against its own torch, which may lack what later headers declare
fi
for mode in $modes; do
  echo "== wheel: GRPO_KERNELS_BUILD=$mode"
  build_wheel "$oldest" "$(torch_dir "$against")" "$mode" "$work/$mode"
  wheel=$(ls "$work/$mode"/*.whl)
  du -h "$wheel" | sed "s#$work/$mode/##"
  "$oldest" - "$wheel" "$mode" <<'PY'
import sys, zipfile
names = zipfile.ZipFile(sys.argv[1]).namelist()
mode = sys.argv[2]
compiled = sorted(name for name in names if name.endswith(".so"))
backends = {"none": [], "cpu": ["cpu"], "cuda": ["cpu", "cuda"]}[mode]
assert compiled == [f"grpo_kernels/libgrpo_kernels_{backend}.so" for backend in backends], compiled
assert {name.split("/")[0] for name in names if name.endswith("__init__.py")} == {"grpo_conformance", "grpo_kernels", "grpo_trainer"}, names
assert "grpo_kernels/py.typed" in names
assert "-py3-none-" in sys.argv[1] and (mode == "none") == sys.argv[1].endswith("-any.whl"), sys.argv[1]
PY
  # torch provides all of CUDA except the runtime, which is linked statically (see CMakeLists.txt) and must not leak.
  mkdir "$work/content-$mode" && "$oldest" -m zipfile -e "$wheel" "$work/content-$mode"
  for library in "$work/content-$mode"/grpo_kernels/*.so; do
    [ -e "$library" ] || continue
    needed=$(readelf -d "$library" | grep NEEDED)
    if grep -E "python|cudart" <<<"$needed" >&2; then echo "$library needs Python or a CUDA runtime" >&2; exit 1; fi
    if readelf -d "$library" | grep -E "R(UN)?PATH" >&2; then echo "$library has a path of this machine" >&2; exit 1; fi
    if nm -D "$library" | grep -E " _?Py[A-Z_]" >&2; then echo "$library uses Python" >&2; exit 1; fi
    [[ $library == *_cuda.so ]] || continue
    grep -q "\[libtorch_cuda.so\]" <<<"$needed" || { echo "$library does not need libtorch_cuda.so" >&2; exit 1; }
    if nm -D --defined-only "$library" | grep -E " _*cuda" >&2; then echo "$library exports CUDA's runtime" >&2; exit 1; fi
  done
  "$oldest" -m pip uninstall -q -y grpo-kernels 2>/dev/null
  "$oldest" -m pip install -q --no-deps "$wheel"
  # A symbol missing from torch or from a library shows when the library is loaded. That of the CUDA kernels loads with
  # every CUDA build of torch, with or without a GPU.
  (cd "$work" && "$oldest" -m grpo_kernels && "$oldest" - "$mode" "$root" <<'PY'
import sys, torch, grpo_kernels
from grpo_kernels import backends
mode, root = sys.argv[1:]
assert not grpo_kernels.__file__.startswith(root + "/grpo_kernels"), grpo_kernels.__file__
assert torch.version.cuda, "the oldest torch must be a CUDA build"
wanted = {"none": set(), "cpu": {"cpu"}, "cuda": {"cpu", "cuda"}}[mode]
assert set(backends.build_facts()) == wanted, (backends.cpu_error, backends.cuda_error)
if mode == "cuda" and not torch.cuda.is_available():
    assert grpo_kernels.available_kernels()["cuda"] == "no CUDA device", grpo_kernels.available_kernels()
PY
  )
  # The compiled libraries and the registration with torch and torch.compile are the most sensitive to versions.
  case "$mode-$quick" in
    *-quick) tests=(tests/ops -k opcheck) ;;
    none-) tests=(tests/ops -m "not slow") ;;
    # only this mode has csrc, with which the tests emulate the CUDA kernels, compiled against the oldest torch
    cpu-) tests=(tests/ops) && cp -r "$root/csrc" "$root/tools" "$work" ;;
    cuda-) tests=(tests/ops/group_advantages/test_backends.py) && rm -rf "$work/csrc" ;;
  esac
  run_tests "$oldest"
  if [ "$mode" = cpu ] || [ "$quick" ]; then
    # Folders on PYTHONPATH come before the editable install of the checkout.
    echo "== the same file under $("$newest" -V) and torch $("$newest" -c 'import torch; print(torch.__version__)')"
    rm -rf "$work/csrc"
    tests=(tests/ops -k "opcheck and cpu")
    run_tests env PYTHONPATH="$work/content-$mode" "$newest"
  fi
done

if [ -z "$quick" ]; then
  echo "== wheel built against the oldest torch, run under the newest"
  rm -rf "$work/unpacked/build"
  build_wheel "$newest" "$(torch_dir "$oldest")" "${modes##* }" "$work/older"
  mkdir "$work/content" && "$newest" -m zipfile -e "$work"/older/*.whl "$work/content"
  rm -rf "$work/csrc"
  tests=(tests/ops -m "not slow")
  run_tests env PYTHONPATH="$work/content" "$newest"
fi
