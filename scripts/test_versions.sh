#!/usr/bin/env bash
# Runs the tests of model families once with each set of other versions of transformers and transformer-lens, prints a
# line for each, and fails if any has failed.
#   [TESTS="FILE ..."] scripts/test_versions.sh "python -m pytest -q" ["NAME==VERSION [NAME==VERSION]" ...]
# The other versions are installed beside the environment, in $VERSIONS_FOLDER (.versions), and found before its own. What they
# depend on stays as it is.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
pytest=$1
shift
installed=${VERSIONS_FOLDER:-$PWD/.versions}
versions=("$@")
if [ ${#versions[@]} -eq 0 ]; then
    versions=(
        transformers==5.22.2 transformers==5.21.1 "transformers==5.21.1 transformer-lens==4.0.0"
        transformer-lens==4.2.0 transformer-lens==4.1.0
    )
fi
read -ra files <<<"${TESTS:-tests/models tests/field/test_families.py tests/kvcache/test_sliding.py \
    tests/invariants/test_output.py tests/capture/test_heads.py tests/replays}"
output=$(mktemp)
trap 'rm -f "$output"' EXIT
failed=0
for set in "${versions[@]}"; do
    began=$SECONDS
    path=$PWD
    for package in $set; do
        folder=$installed/${package/==/-}
        if [ ! -d "$folder" ]; then
            .venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --target "$folder.new" "$package" || exit 1
            mv "$folder.new" "$folder"
        fi
        path=$folder:$path
    done
    # shellcheck disable=SC2086
    PYTHONPATH=$path $pytest "${files[@]}" >"$output" 2>&1
    status=$?
    counts=$(tail -1 "$output" | grep -oE '[0-9]+ (passed|failed|errors?)' | paste -sd, | sed 's/,/, /g')
    if [ $status -eq 0 ]; then
        echo "$set: passed (${counts}; $((SECONDS - began)) s)"
    else
        failed=1
        echo "$set: FAILED (${counts:-pytest ended with $status}; $((SECONDS - began)) s)"
        sed 's/^/    /' "$output" | tail -60
    fi
done
exit $failed
