#!/usr/bin/env bash
# Installs what the tests in tests/slurm need on Debian and Ubuntu: Slurm's and munge's programs. The
# tests start daemons of their own; those that the packages bring are not started.
set -euo pipefail

export PATH=$PATH:/usr/sbin:/sbin
missing=()
for name in slurmctld slurmd sbatch munged ip nsenter unshare; do
    command -v "$name" >/dev/null || missing+=("$name")
done
((${#missing[@]})) || exit 0

fail() {
    echo "error: $*" >&2
    exit 1
}
((EUID == 0)) || fail "${missing[*]} missing, and only root can install packages: run this with sudo"
command -v apt-get >/dev/null || fail "${missing[*]} missing, and there is no apt-get: install them by hand"

policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
    trap 'rm $policy' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install --yes --no-install-recommends slurm-wlm munge iproute2 util-linux
