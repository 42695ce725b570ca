#!/usr/bin/env bash
# Compiles the CPU kernels of the sdist for arm64 and, under an emulator, runs tests of every op against float64.
#
#   bash tools/check_arm64.sh
#
# Needs Debian or Ubuntu with the packages g++-aarch64-linux-gnu and qemu-user-static, and the package lists of arm64:
#   dpkg --add-architecture arm64 && apt-get update && apt-get install g++-aarch64-linux-gnu qemu-user-static
# Python and its libraries for arm64 are unpacked into a folder, not installed. Also compiles and links the library for
# macOS with the compiler of the package ziglang; nothing runs there.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
host="$root/.venv/bin/python"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PATH="$root/.venv/bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1
for tool in aarch64-linux-gnu-g++ qemu-aarch64-static dpkg apt-get; do
  command -v "$tool" >/dev/null || { echo "check_arm64: $tool not found; see the first lines of $0" >&2; exit 1; }
done

torch_version=$("$host" -c 'import torch; print(torch.__version__.partition("+")[0])')
fetch() { "$host" -m pip download -q --only-binary=:all: --no-deps --python-version 3.11 --implementation cp "$@"; }

echo "== torch, Python and test packages for arm64"
fetch --platform manylinux_2_28_aarch64 -d "$work/linux" "torch==$torch_version"
"$host" -m zipfile -e "$work"/linux/torch-*.whl "$work/torch"
"$host" -m pip install -q --target "$work/site" --only-binary=:all: --no-deps --python-version 3.11 --implementation cp \
  --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 -c "$root/tools/constraints.txt" \
  numpy pytest hypothesis filelock sympy networkx jinja2 fsspec typing-extensions mpmath iniconfig pluggy packaging \
  sortedcontainers markupsafe pygments setuptools
packages="python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libstdc++6 libgcc-s1 libgomp1 zlib1g
  libexpat1 libssl3 libffi8 liblzma5 libbz2-1.0 libsqlite3-0 libuuid1"
mkdir "$work/debs" "$work/sysroot"
# shellcheck disable=SC2086
(cd "$work/debs" && apt-get download -q $(printf '%s:arm64 ' $packages))
for package in "$work"/debs/*.deb; do dpkg -x "$package" "$work/sysroot"; done
"$host" "$root/tools/cuda_stand_ins.py" "$work/torch/torch" "$work/sysroot"

echo "== the sdist, compiled for arm64"
mkdir "$work/source" "$work/package"
git -C "$root" archive --format=tar HEAD | tar -x -C "$work/source"
(cd "$work/source" && GRPO_KERNELS_BUILD=none "$host" setup.py -q sdist -d "$work/sdist" >/dev/null)
tar -xf "$work"/sdist/*.tar.gz -C "$work/package" --strip-components=1
compile() {  # TORCH_DIR BUILD OUTPUT CMAKE_OPTION...
  cmake -S "$work/package" -B "$2" -G Ninja -DTORCH_DIR="$1" -DGRPO_OUTPUT_DIR="$3" "${@:4}" >/dev/null
  cmake --build "$2" --parallel "${MAX_JOBS:-$(nproc)}" | tail -n 1
}
compile "$work/torch/torch" "$work/build" "$work/package/grpo_kernels" -DCMAKE_SYSTEM_NAME=Linux \
  -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
file_type() { readelf -h "$1" | sed -n 's/ *Machine: *//p'; }
[ "$(file_type "$work/package/grpo_kernels/libgrpo_kernels_cpu.so")" = AArch64 ]

# The emulator runs any arm64 program with the host's /proc and /sys; torch looks up the processor there.
mkdir -p "$work/sysroot/proc" "$work/sysroot/sys/devices/system/cpu/cpu0/regs/identification"
cat >"$work/sysroot/proc/cpuinfo" <<'CPU'
processor	: 0
BogoMIPS	: 50.00
Features	: fp asimd evtstrm crc32 cpuid
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x0
CPU part	: 0xd08
CPU revision	: 3

CPU
for name in possible present online; do echo 0 >"$work/sysroot/sys/devices/system/cpu/$name"; done
echo 0x00000000410fd083 >"$work/sysroot/sys/devices/system/cpu/cpu0/regs/identification/midr_el1"
mkdir "$work/tested" && cp -r "$work/package/grpo_kernels" "$root/tests" "$root/pyproject.toml" "$work/tested"
emulated() {
  local libraries="$work/sysroot/lib/aarch64-linux-gnu:$work/sysroot/usr/lib/aarch64-linux-gnu"
  (cd "$work/tested" && qemu-aarch64-static -cpu cortex-a72 -L "$work/sysroot" -E LD_LIBRARY_PATH="$libraries" \
    -E PYTHONHOME="$work/sysroot/usr" -E OMP_NUM_THREADS=1 -E PYTHONPATH="$work/tested:$work/torch:$work/site" \
    "$work/sysroot/usr/bin/python3.11" "$@")
}

echo "== under the emulator"
emulated -m grpo_kernels | tee "$work/facts"
grep -qE '^ +cpu +ok$' "$work/facts"
# pytest fails if it runs no test. No compiler is there for torch.compile.
emulated -m pytest -q -p no:cacheprovider --hypothesis-profile slow tests/ops/*/test_*kernels.py \
  -k "cpu and (float32 or float64) and not compile and not opcheck" --junit-xml "$work/tests.xml"
"$host" - "$work/tests.xml" <<'PY'
import sys
from xml.etree import ElementTree
suite = ElementTree.parse(sys.argv[1]).getroot().find("testsuite").attrib
ran = int(suite["tests"]) - int(suite["skipped"])
print(f"{ran} tests ran")
assert ran >= 250, "fewer tests ran than the ops have"
PY

echo "== macOS: compiled and linked, not run"
"$host" -m venv "$work/zig" && "$work/zig/bin/python" -m pip install -q ziglang
fetch --platform macosx_14_0_arm64 -d "$work/mac" "torch==$torch_version"
"$host" -m zipfile -e "$work"/mac/torch-*.whl "$work/torch-mac"
# zig takes no -bundle, the flag of a library that is only loaded at run time
cat >"$work/clang" <<ZIG
#!/usr/bin/env bash
exec "$work/zig/bin/python" -m ziglang c++ "\${@/#-bundle/-shared}"
ZIG
chmod +x "$work/clang"
export ZIG_GLOBAL_CACHE_DIR="$work/zig/cache" ZIG_LOCAL_CACHE_DIR="$work/zig/cache"
compile "$work/torch-mac/torch" "$work/build-mac" "$work/mac" -DCMAKE_SYSTEM_NAME=Darwin -DCMAKE_SYSTEM_PROCESSOR=arm64 \
  -DCMAKE_CXX_COMPILER="$work/clang" -DCMAKE_CXX_COMPILER_TARGET=aarch64-macos.14.0 -DCMAKE_OSX_SYSROOT=
"$host" - "$work/mac/libgrpo_kernels_cpu.so" <<'PY'
import sys
header = open(sys.argv[1], "rb").read(8)
assert header == bytes.fromhex("cffaedfe0c000001"), header.hex()  # Mach-O of 64 bits for arm64
PY
echo "arm64: ok"
