#!/usr/bin/env bash
# Runs the tests marked `determinism` once in each environment, prints a line for each, and fails if any has failed.
#   [TESTS="FILE ..."] scripts/test_processors.sh "python -m pytest -q" [NAME=VALUE[,NAME=VALUE] ...]
# By default all files with such tests, and all environments.
# Each environment makes the libraries take other code: fewer vector instructions, or another number of threads. Where
# the processor lacks what a value names, the library takes what there is.
# With ATEN_CPU_CAPABILITY=avx2 alone, torch 2.13's attention in bfloat16 asks oneDNN for AMX where the processor has it, and
# then fails ("pack_vnni2 is only supported when avx512 is supported"): so oneDNN is kept from AMX too.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
pytest=$1
shift
environments=("$@")
if [ ${#environments[@]} -eq 0 ]; then
    environments=(
        OMP_NUM_THREADS=1 OMP_NUM_THREADS=2 OMP_NUM_THREADS=4
        ATEN_CPU_CAPABILITY=avx2,ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16
        ONEDNN_MAX_CPU_ISA=AVX2 ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16
        MKL_CBWR=COMPATIBLE MKL_ENABLE_INSTRUCTIONS=AVX2
    )
fi
# Files alone that hold such tests: collecting all tests takes longer than running some of them.
read -ra files <<<"${TESTS:-}"
if [ ${#files[@]} -eq 0 ]; then
    mapfile -t files < <(grep -rlE '^pytestmark = .*mark\.determinism' tests --include='test_*.py' | sort)
fi
output=$(mktemp)
trap 'rm -f "$output"' EXIT
failed=0
for environment in "${environments[@]}"; do
    began=$SECONDS
    # shellcheck disable=SC2086
    env -u MKL_NUM_THREADS ${environment//,/ } $pytest -m "determinism and not slow" "${files[@]}" >"$output" 2>&1
    status=$?
    counts=$(tail -1 "$output" | grep -oE '[0-9]+ (passed|failed|errors?)' | paste -sd, | sed 's/,/, /g')
    if [ $status -eq 0 ]; then
        echo "$environment: passed (${counts}; $((SECONDS - began)) s)"
    else
        failed=1
        echo "$environment: FAILED (${counts:-pytest ended with $status}; $((SECONDS - began)) s)"
        sed 's/^/    /' "$output" | tail -60
    fi
done
exit $failed
