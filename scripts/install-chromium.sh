#!/usr/bin/env bash
# Installs the programs for the tests of web pages, on Debian: a browser, curl and openssl.
set -euo pipefail
# shellcheck source=/dev/null
. "$(dirname "$0")/apt.sh"

missing=()
for name in curl openssl; do
    command -v "$name" >/dev/null || missing+=("$name")
done
# Chrome works too.
command -v chromium google-chrome >/dev/null || missing+=(chromium)
((${#missing[@]})) || exit 0

prepare_apt "${missing[*]}"
# Ubuntu has chromium only as a snap, which does not run in the namespaces of the tests.
[[ ${missing[*]} != *chromium* ]] || ! grep -q '^ID=ubuntu' /etc/os-release ||
    fail "no browser was found for the tests: install Chrome's own package by hand"

apt-get update
apt-get install --yes --no-install-recommends "${missing[@]}"
