#!/usr/bin/env bash
# with-slurm.sh VERSION COMMAND...: runs a command with another version of Slurm, as root on Debian and
# Ubuntu. `make test-slurm` uses it.
# The first call for a version installs a system with that Slurm in /opt/slurm-tests (700 MB). It also
# installs debootstrap, and changes nothing else on this machine. The command sees the programs of that
# system, and the folders of this machine that are not part of its system.
set -euo pipefail
# shellcheck source=/dev/null
. "$(dirname "$0")/apt.sh"

case ${1:-} in
23.11) suite=noble make=make_ubuntu ;;
24.11) suite=trixie make=make_system ;;
25.11) suite=resolute make=make_ubuntu ;;
26.05) suite=sid make=make_system ;;
*) fail "the versions are 23.11, 24.11, 25.11 and 26.05, not '${1:-}'" ;;
esac
export PATH=$PATH:/usr/sbin:/sbin
version=$1 root=/opt/slurm-tests/$1
shift

make_root() {
    local new=$root.new
    prepare_debootstrap "$root"
    rm -rf --one-file-system "$new"
    mkdir -p "$new"
    # python3 brings the libraries that the Python of the tests needs. gcc compiles a plugin.
    "$make" "$new" "$suite" \
        slurm-wlm,slurmdbd,mariadb-server-core,libslurm-dev,gcc,libc6-dev,munge,iproute2,util-linux,util-linux-extra,procps,git,make,curl,openssl,python3,libreadline8t64,tcl
    [[ $(chroot "$new" slurmctld -V) =~ $version ]] ||
        fail "$suite has $(chroot "$new" slurmctld -V) by now, not $version"
    chroot "$new" apt-get clean
    mv "$new" "$root"
}

[[ -d $root ]] || make_root
(($#)) || exit 0
exec unshare --mount --propagation=private "$(dirname "$0")/enter-system.sh" "$root" "$@"
