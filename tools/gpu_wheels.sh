#!/usr/bin/env bash
# Collects the packages that a GPU machine without a network lacks into .wheels, from where gpu_check imports them.
# Dependencies are left out, so that torch, triton and numpy stay those of the machine.
#   tools/gpu_wheels.sh [PYTHON_VERSION=3.12] [PACKAGE ...]
# The wheels and the libraries in grpo_kernels travel together and must fit LIMIT MiB. quack (0.7 MiB) therefore stays
# at home: the compiler that it needs, nvidia-cutlass-dsl 4.8.1, has 91 MiB for CUDA 13 alone.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:-3.12}
packages=("${@:2}")
if [ ${#packages[@]} -eq 0 ]; then
  packages=(setuptools packaging pytest pluggy iniconfig pytest-xdist execnet hypothesis sortedcontainers trl datasets
    dill multiprocess verl tensordict pyvers orjson importlib-metadata omegaconf antlr4-python3-runtime codetiming
    liger-kernel cut-cross-entropy fastcluster pytest-benchmark py-cpuinfo rouge-score nltk vaderSentiment peft rich
    pydantic pydantic-core annotated-types typing-inspection typing-extensions)
  # a library that is carried need not be built
  [ -e grpo_kernels/libgrpo_kernels_cuda.so ] || packages+=(cmake ninja)
fi
platforms=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
for glibc in 39 35 34 31 28 27 24 17; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done

rm -rf .wheels
for package in "${packages[@]}"; do
  pin=$(grep -iE "^${package//[-_]/[-_]}==" tools/constraints.txt | tail -1 | cut -d';' -f1 || true)
  options=(--quiet --disable-pip-version-check --no-deps "${pin:-$package}")
  # a package published as source only becomes a wheel of pure Python, which serves every version
  python3 -m pip download "${options[@]}" --only-binary=:all: --python-version "$version" --implementation cp \
    "${platforms[@]}" -d .wheels || python3 -m pip wheel "${options[@]}" -w .wheels
done

shopt -s nullglob
bytes=$(du -cb .wheels/*.whl grpo_kernels/*.so | tail -1 | cut -f1)
mib=$(((bytes + 1048575) / 1048576))
echo "$mib MiB of wheels and libraries, of at most ${LIMIT:=64}"
[ "$mib" -le "$LIMIT" ]
