#!/usr/bin/env bash
# Builds the distributions into dist/ and checks them: the sdist, and from it a wheel without compiled kernels and one with.
# A wheel serves every version of Python, and every torch from 2.11 on.
#
#   bash tools/build_wheels.sh [TAG]    TAG must be v and the version
#
#   dist/*.tar.gz
#   dist/*-none-any.whl       no compiled kernels
#   dist/*-manylinux*.whl     CPU kernels, and CUDA kernels where nvcc is found, which a release for x86-64 must have
#
# `make dist` prepares the environment. The glibc that a wheel needs is that of this machine or older; a release is built in
# a manylinux container.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PATH="$root/.venv-dist/bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1
cd "$root"

rm -rf dist
GRPO_KERNELS_BUILD=none python -m build --sdist --no-isolation --outdir dist . >"$work/log" || { cat "$work/log"; exit 1; }
sdist=$(ls dist/*.tar.gz)
version=$(basename "$sdist" .tar.gz | sed 's/.*-//')
if [ "${1:-}" ] && [ "$1" != "v$version" ]; then
  echo "build_wheels: the tag must be v$version, the version of the package, got $1" >&2
  exit 1
fi

compiled=cpu
if command -v nvcc >/dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; then compiled=cuda; fi
if [ "${1:-}" ] && [ "$(uname -m)" = x86_64 ] && [ $compiled = cpu ]; then
  echo "build_wheels: a release for x86-64 must have CUDA kernels; put nvcc on PATH or set CUDA_HOME" >&2
  exit 1
fi
mkdir "$work/source" && tar -xf "$sdist" -C "$work/source" --strip-components=1
for mode in none $compiled; do
  GRPO_KERNELS_BUILD=$mode python -m pip wheel -q --no-build-isolation --no-deps -w "$work/$mode" "$work/source"
  if [ "$mode" = none ]; then
    mv "$work/none"/*.whl dist
  else
    # Names the glibc that the wheel needs, and fails if it needs a library that no manylinux system has. torch and its
    # CUDA libraries are on the user's machine.
    auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' -w dist "$work/$mode"/*.whl
  fi
done
wheels=$(find dist -name '*.whl' | sort)
# shellcheck disable=SC2086
twine check --strict "$sdist" $wheels

for distribution in $wheels; do
  python -m pip install -q --no-deps --force-reinstall "$distribution"
  (cd "$work" && python - "$version" "$distribution" <<'PY'
import sys
import grpo_kernels
version, wheel = sys.argv[1:]
assert grpo_kernels.__version__ == version, grpo_kernels.__version__
state = grpo_kernels.available_kernels()["cpu"]
assert ("none-any" in wheel) == (state != "ok"), state
assert "-py3-none-" in wheel, wheel
PY
)
done
# The sdist builds with the packages of this environment, as one without a wheel for the machine must.
GRPO_KERNELS_BUILD=none python -m pip install -q --no-deps --no-build-isolation --force-reinstall "$sdist"
(cd "$work" && python -m grpo_kernels)
python -m pip uninstall -q -y grpo-kernels
find dist -type f | sort | xargs du -h
