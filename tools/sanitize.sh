#!/usr/bin/env bash
# Builds the kernels with a sanitizer and runs their tests: tools/sanitize.sh address|undefined|thread [ISA]
#
# The sanitized module lives in build/sanitize-*, beside a copy of the package; -S keeps Python from finding
# the installed one. Python, torch and OpenMP are not instrumented: leaks of theirs and their own locks are
# not reported. -s, so that pytest does not swallow a report before the process ends; its frames have names where
# llvm-symbolizer is installed.
set -euo pipefail
kind=${1:?address, undefined or thread}
isa=${2:-avx512}
cd "$(dirname "$0")/.."
root=$PWD
python=${PYTHON:-$root/.venv/bin/python}
export PATH="$(dirname "$python"):$PATH"
build=build/sanitize-$kind-$isa

cmake -S native -B "$build/cmake" -G Ninja -DLONGSPAN_ISAS="$isa" -DLONGSPAN_SANITIZE="$kind" -DPython_EXECUTABLE="$python"
cmake --build "$build/cmake" -j "$(nproc)"
rm -rf "$build/package"
mkdir -p "$build/package"
cp -r src/longspan "$build/package/"
rm -f "$build"/package/longspan/*.so
cmake --install "$build/cmake" --prefix "$build/package"

case $kind in
  address) runtime=libasan.so ;;
  undefined) runtime=libubsan.so ;;
  thread) runtime=libtsan.so ;;
esac
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
export PYTHONPATH="$root/$build/package:$packages" OMP_NUM_THREADS=1 LONGSPAN_ISA=$isa
export ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS="halt_on_error=1:report_mutex_bugs=0:suppressions=$root/tools/tsan.supp"
LD_PRELOAD="$("${CXX:-g++}" -print-file-name=$runtime)" \
  "$python" -S -m pytest -q -s -p no:cacheprovider "${@:3}" tests/ops/native -k "not fork and not instruction_set and not idle"
