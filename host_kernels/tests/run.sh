#!/bin/sh
# Builds and runs the native tests: plain, then with the address and undefined-behaviour
# sanitizers, then with the thread sanitizer. Usage: host_kernels/tests/run.sh [plain|asan|tsan]...
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
for build in ${*:-plain asan tsan}; do
  case $build in
    plain) sanitize= ;;
    asan) sanitize=address,undefined ;;
    tsan) sanitize=thread ;;
    *) echo "unknown build '$build': use plain, asan or tsan" >&2; exit 2 ;;
  esac
  echo "== native tests: $build"
  cmake -S "$root" -B "$root/build/native-$build" -DHERALD_EXTENSION=OFF \
    -DHERALD_NATIVE_TESTS=ON -DHERALD_SANITIZE="$sanitize" >/dev/null
  cmake --build "$root/build/native-$build" --parallel 2
  ctest --test-dir "$root/build/native-$build" --output-on-failure
done
