#!/usr/bin/env bash
# Installs what the tests of shared file systems need on Debian and Ubuntu: FUSE, for file systems that
# are programs.
set -euo pipefail
# shellcheck source=/dev/null
. "$(dirname "$0")/apt.sh"

command -v fusermount3 >/dev/null && exit 0
prepare_apt "fuse3"
apt-get update
apt-get install --yes --no-install-recommends fuse3
