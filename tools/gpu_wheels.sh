#!/usr/bin/env bash
# Collects the packages that a GPU machine without a network lacks into .wheels, from where gpu_check installs them.
# Dependencies are left out, so that torch, triton and numpy stay those of the machine.
#   tools/gpu_wheels.sh [PYTHON_VERSION=3.12] [PACKAGE ...]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
version=${1:-3.12}
shift || true
# Peers and their imports that an image with transformers, accelerate and sentence-transformers lacks.
packages=("$@")
if [ ${#packages[@]} = 0 ]; then
  packages=(trl datasets dill multiprocess liger-kernel cut-cross-entropy fastcluster pytest-benchmark py-cpuinfo
    rouge-score nltk vaderSentiment peft rich)
fi
platforms=()
for glibc in 39 35 34 31 28 27 24 17; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)

rm -rf "$root/.wheels"
mkdir "$root/.wheels"
for package in "${packages[@]}"; do
  pin=$(grep -iE "^${package//[-_]/[-_]}==" "$root/tools/constraints.txt" || true)
  if ! python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version "$version" --implementation cp "${platforms[@]}" -d "$root/.wheels" "${pin:-$package}"; then
    # published as source only: a wheel of pure Python serves every version
    python3 -m pip wheel --quiet --disable-pip-version-check --no-deps -w "$root/.wheels" "${pin:-$package}"
  fi
done
ls -l "$root/.wheels"
du -sh "$root/.wheels"
