#!/bin/sh
# Builds and runs the native tests. Usage: host_kernels/tests/run.sh [BUILD]... [SECONDS]
#   plain     as they are used
#   asan      with the address and undefined-behaviour sanitizers
#   tsan      with the thread sanitizer
#   valgrind  plain, under valgrind, which has instruction sets up to AVX2
#   fuzz      libFuzzer targets with the address and undefined-behaviour sanitizers, SECONDS each
# Without a BUILD: plain, asan and tsan. What valgrind and fuzz need may be missing; they say so.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
seconds=20
builds=
for word in "$@"; do
  case $word in
    plain | asan | tsan | valgrind | fuzz) builds="$builds $word" ;;
    *[!0-9]* | '')
      echo "unknown build '$word': use plain, asan, tsan, valgrind or fuzz" >&2
      exit 2
      ;;
    *) seconds=$word ;;
  esac
done

configure() { # configure BUILD OPTION...
  folder=$root/build/native-$1
  shift
  cmake -S "$root" -B "$folder" -DHERALD_EXTENSION=OFF "$@" >/dev/null
  cmake --build "$folder" --parallel 2
}

under_valgrind() {
  for concern in attend index select pool rows machine nodes; do
    echo "-- $concern"
    valgrind --quiet --error-exitcode=1 --leak-check=full \
      --show-leak-kinds=definite --errors-for-leak-kinds=definite \
      "$root/build/native-plain/host_kernels/tests/${concern}_test"
  done
}

fuzz() {
  for target in attend rows candidates settings; do
    echo "-- $target, $seconds s"
    corpus=$root/build/native-fuzz/corpus-$target
    mkdir -p "$corpus"
    "$root/build/native-fuzz/host_kernels/tests/fuzz/${target}_fuzz" -max_total_time="$seconds" \
      -timeout=20 -max_len=1024 -len_control=0 -print_final_stats=1 -verbosity=0 -print_funcs=0 \
      -artifact_prefix="$root/build/native-fuzz/" "$corpus"
  done
}

for build in ${builds:-plain asan tsan}; do
  echo "== native tests: $build"
  case $build in
    plain) configure plain -DHERALD_NATIVE_TESTS=ON ;;
    asan) configure asan -DHERALD_NATIVE_TESTS=ON -DHERALD_SANITIZE=address,undefined ;;
    tsan) configure tsan -DHERALD_NATIVE_TESTS=ON -DHERALD_SANITIZE=thread ;;
    valgrind)
      command -v valgrind >/dev/null || { echo "skipped: valgrind is not installed"; continue; }
      configure plain -DHERALD_NATIVE_TESTS=ON
      under_valgrind
      continue
      ;;
    fuzz)
      clang=$(command -v clang++ || command -v clang++-19 || command -v clang++-18 ||
        command -v clang++-17 || command -v clang++-16 || command -v clang++-15 ||
        command -v clang++-14) || { echo "skipped: clang++ is not installed"; continue; }
      configure fuzz -DHERALD_FUZZ=ON -DCMAKE_CXX_COMPILER="$clang"
      fuzz
      continue
      ;;
  esac
  ctest --test-dir "$root/build/native-$build" --output-on-failure
done
