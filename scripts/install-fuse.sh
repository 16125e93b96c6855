#!/usr/bin/env bash
# Installs FUSE for the tests of shared file systems, on Debian and Ubuntu. With FUSE, a program can serve a
# file system.
set -euo pipefail
# shellcheck source=/dev/null
. "$(dirname "$0")/apt.sh"

command -v fusermount3 >/dev/null && exit 0
prepare_apt "fuse3"
apt-get update
apt-get install --yes --no-install-recommends fuse3
