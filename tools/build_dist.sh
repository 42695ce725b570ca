#!/usr/bin/env bash
# Builds what a release publishes into dist/ and checks it: the sdist, from it the wheel without compiled kernels and
# the wheel with CPU kernels for the Python of .venv-dist, which is then installed and imported.
#
#   bash tools/build_dist.sh [TAG]    TAG must be v and the version
#
# `make dist` prepares the environment. CUDA kernels are built on the machine that runs them, from the sdist.
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
  echo "build_dist: the tag must be v$version, the version of pyproject.toml, got $1" >&2
  exit 1
fi

mkdir "$work/source" && tar -xf "$sdist" -C "$work/source" --strip-components=1
for mode in none cpu; do
  GRPO_KERNELS_BUILD=$mode python -m pip wheel -q --no-build-isolation --no-deps -w "$work/$mode" "$work/source"
done
mv "$work"/none/*.whl dist
# names the glibc that the wheel needs; torch is on the user's machine
auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' -w dist "$work"/cpu/*.whl
twine check --strict dist/*

python -m pip install -q --no-deps --force-reinstall dist/*-cp*.whl
(cd "$work" && python -m grpo_kernels && python - "$version" <<'PY'
import sys, grpo_kernels
assert grpo_kernels.__version__ == sys.argv[1], grpo_kernels.__version__
assert grpo_kernels.available_backends()["cpu"] == "ok", grpo_kernels.available_backends()
PY
)
python -m pip uninstall -q -y grpo-kernels
ls -l dist
