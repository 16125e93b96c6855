#!/usr/bin/env bash
# Installs what the tests of the servers' pages need, on Debian: a browser, curl and openssl.
set -euo pipefail

missing=()
for name in curl openssl; do
    command -v "$name" >/dev/null || missing+=("$name")
done
# Chrome will do as well.
command -v chromium google-chrome >/dev/null || missing+=(chromium)
((${#missing[@]})) || exit 0

fail() {
    echo "error: $*" >&2
    exit 1
}
((EUID == 0)) || fail "${missing[*]} missing, and only root can install packages: run this with sudo"
command -v apt-get >/dev/null || fail "${missing[*]} missing, and there is no apt-get: install them by hand"
# Ubuntu's chromium is a snap, which does not run in the namespaces of the tests.
[[ ${missing[*]} != *chromium* ]] || ! grep -q '^ID=ubuntu' /etc/os-release ||
    fail "there is no browser for the tests: install Chrome's own package by hand"

export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install --yes --no-install-recommends "${missing[@]}"
