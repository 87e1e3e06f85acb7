#!/usr/bin/env bash
# Installs Debian's chromium, which the page tests drive, where it is absent. Without the right to install it says what
# to do, and fails only in CI: elsewhere the other tests still run, and those of pages are skipped.
set -euo pipefail
browser=${1:-/usr/bin/chromium}
if [ -x "$browser" ]; then exit 0; fi

as_root=()
if [ "$(id -u)" != 0 ]; then as_root=(sudo -n); fi
install_chromium() {
    command -v apt-get >/dev/null || return 1
    if [ "$(id -u)" != 0 ]; then sudo -n true 2>/dev/null || return 1; fi
    echo "set-up: installing chromium with apt-get"
    "${as_root[@]}" apt-get -qq update || return 1
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get -qq install -y --no-install-recommends chromium fonts-liberation >/dev/null || return 1
    [ -x "$browser" ]
}
if install_chromium; then exit 0; fi

echo "set-up: the page tests need $browser; as root: apt-get install chromium" >&2
if [ -n "${CI:-}" ]; then exit 1; fi
