# The verb gpu-test of ./run, which reads this file: all tests on a GPU, then a few of them under
# compute-sanitizer, and a summary.
# shellcheck shell=bash

# Quick tests that meet cut tiles, empty sequences, every input and both passes.
readonly kSanitized='DeviceHarness.*:Shapes.ZeroLengths:*/Robust.NothingIsWrittenOutside/*:*/ForwardProperty.OneKey*:Hopper.RunningMaximum:DeviceLayers.AnyStrides*:DeviceLayers.GraphReplay*'

no_gpu_test() {
  printf 'run: gpu-test: %s; ./run test runs everything that needs no GPU\n' "$1" >&2
  exit 3
}

# gpu_shards FOLDER PROGRAM [gtest options]: the tests in several processes, for the oracle's sake: it
# is the CPU that these tests wait for. True when all passed.
gpu_shards() {
  local folder=$1 program=$2 count n code=0 processes=()
  shift 2
  count=$(nproc)
  [ "$count" -le 8 ] || count=8
  for ((n = 0; n < count; ++n)); do
    GTEST_TOTAL_SHARDS=$count GTEST_SHARD_INDEX=$n "$program" "$@" \
      "--gtest_output=json:$folder/tests.$n.json" > "$folder/tests.$n.log" 2>&1 &
    processes+=($!)
  done
  for n in "${!processes[@]}"; do
    if ! wait "${processes[n]}"; then
      code=1
      grep -v '^\[ *\(RUN\|OK\|-*\) *\]' "$folder/tests.$n.log" | tail -n 40 >&2 || true
    fi
  done
  cat "$folder"/tests.*.log | grep '^\[ UNTESTED \]' >&2 || true
  return "$code"
}

# gpu_sanitizer FOLDER PROGRAM TOOL: 0 clean, 1 findings, 2 the tool does not run here.
gpu_sanitizer() {
  local sanitizer log=$1/$3.log
  sanitizer=$(cuda_program compute-sanitizer) || return 2
  "$sanitizer" --tool "$3" --error-exitcode 9 "$2" "--gtest_filter=$kSanitized" \
    "--gtest_output=json:$1/$3.0.json" > "$log" 2>&1 && return 0
  if grep -q 'Device not supported' "$log"; then return 2; fi
  tail -n 40 "$log" >&2
  return 1
}

# gpu_python FOLDER: the tests of the ops for PyTorch on the GPU. 0 passed, 1 failed, 2 not possible here.
gpu_python() {
  local python log=$1/python.log
  python=$(torch_python)
  if [ ! -e build/release/python/fovea/libfovea_torch.so ] || [ -z "$python" ] ||
    ! "$python" -c 'import pytest, numpy, torch; assert torch.cuda.is_available()' > /dev/null 2>&1; then
    return 2
  fi
  PYTHONPATH=build/release/python "$python" -m pytest -q -p no:cacheprovider tests/python --device cuda \
    --junitxml "$1/python.0.xml" > "$log" 2>&1 && return 0
  tail -n 40 "$log" >&2
  return 1
}

# gpu_summary FOLDER "step code seconds"...: counts the tests in each step's JSON and XML files.
gpu_summary() {
  local smi=(nvidia-smi -i 0 "--format=csv,noheader")
  GPU=$("${smi[@]}" --query-gpu=name) DRIVER=$("${smi[@]}" --query-gpu=driver_version) \
    COMMIT=$(git describe --always --dirty --abbrev=12 2> /dev/null || echo unknown) \
    python3 tests/gpu/summary.py "$@" > build/gpu-test.json
}

verb_gpu_test() {
  local build_first=yes sanitize=yes options=() argument
  for argument in "$@"; do
    case $argument in
      --no-build) build_first=no ;;
      --no-sanitize) sanitize=no ;;
      --gtest_*) options+=("$argument") ;;
      *) die "gpu-test: $argument is no option of it" "it takes --no-build, --no-sanitize and --gtest_..." ;;
    esac
  done
  has_gpu || no_gpu_test "no GPU on this machine"
  local program=build/release/tests/test_gpu folder=build/gpu-test
  if [ "$build_first" = yes ]; then
    has_nvcc || no_gpu_test "no nvcc on this machine to build the GPU's engines"
    setup
    [ "$build_tests" = ON ] || die "gpu-test: GoogleTest is missing" "on Debian: apt-get install libgtest-dev"
    build release test_gpu fovea_torch
  fi
  [ -x "$program" ] || die "gpu-test: there is no $program" "without --no-build it is built"
  rm -rf "$folder"
  mkdir -p "$folder"
  local steps=() code=0 failed=no began=$SECONDS tool
  step "gpu-test: running the tests of $program"
  gpu_shards "$folder" "$program" "${options[@]}" || code=$?
  steps+=("tests $code $((SECONDS - began))")
  [ "$code" -eq 0 ] || failed=yes
  step "gpu-test: the ops for PyTorch"
  began=$SECONDS code=0
  gpu_python "$folder" || code=$?
  [ "$code" -ne 1 ] || failed=yes
  [ "$code" -ne 2 ] || warn "no Python here has torch for this GPU, pytest and numpy, or the ops are not built: skipped"
  steps+=("python $code $((SECONDS - began))")
  if [ "$sanitize" = yes ]; then
    for tool in memcheck initcheck synccheck; do
      step "gpu-test: compute-sanitizer --tool $tool"
      began=$SECONDS code=0
      gpu_sanitizer "$folder" "$program" "$tool" || code=$?
      [ "$code" -ne 1 ] || failed=yes
      [ "$code" -ne 2 ] || warn "compute-sanitizer is missing, or does not run on this machine: skipped"
      steps+=("$tool $code $((SECONDS - began))")
    done
  fi
  gpu_summary "$folder" "${steps[@]}"
  cat build/gpu-test.json
  [ "$failed" = no ] || die "gpu-test: there were failures (logs in $folder, summary in build/gpu-test.json)"
  step "gpu-test: no failures (summary in build/gpu-test.json)"
}
