#!/usr/bin/env bash
# Installs what the tests of the servers' pages need, on Debian: a browser, curl and openssl.
set -euo pipefail
# shellcheck source=/dev/null
. "$(dirname "$0")/apt.sh"

missing=()
for name in curl openssl; do
    command -v "$name" >/dev/null || missing+=("$name")
done
# Chrome will do as well.
command -v chromium google-chrome >/dev/null || missing+=(chromium)
((${#missing[@]})) || exit 0

prepare_apt "${missing[*]}"
# Ubuntu's chromium is a snap, which does not run in the namespaces of the tests.
[[ ${missing[*]} != *chromium* ]] || ! grep -q '^ID=ubuntu' /etc/os-release ||
    fail "there is no browser for the tests: install Chrome's own package by hand"

apt-get update
apt-get install --yes --no-install-recommends "${missing[@]}"
