#!/usr/bin/env bash
# Installs the programs for tests/slurm on Debian and Ubuntu: Slurm, munge, a database for Slurm's
# accounts, and a compiler for a Slurm plugin. The tests start their own daemons. The daemons of the
# packages are not started.
set -euo pipefail
# shellcheck source=/dev/null
. "$(dirname "$0")/apt.sh"

export PATH=$PATH:/usr/sbin:/sbin
missing=()
for name in slurmctld slurmd slurmdbd mariadbd sbatch munged ip nsenter unshare; do
    command -v "$name" >/dev/null || missing+=("$name")
done
command -v gcc >/dev/null && [[ -e /usr/include/slurm/spank.h ]] || missing+=(spank.h)
((${#missing[@]})) || exit 0

prepare_apt "${missing[*]}"

policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
    trap 'rm $policy' EXIT
fi
apt-get update
apt-get install --yes --no-install-recommends slurm-wlm slurmdbd mariadb-server-core munge iproute2 \
    util-linux gcc libc6-dev libslurm-dev
