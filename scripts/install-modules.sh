#!/usr/bin/env bash
# Installs both module systems for the tests of module lines, on Debian and Ubuntu. Their packages conflict
# with each other and would change every login on this machine. So the script installs only their
# dependencies, and unpacks each package in its own folder. The tests mount these folders over /usr and
# /etc in the namespaces of their cluster.
set -euo pipefail
# shellcheck source=/dev/null
. "$(dirname "$0")/apt.sh"

systems=/var/lib/module-systems # tests/slurm/modules.py has this path too
missing=()
for name in environment-modules lmod; do
    [[ -d $systems/$name ]] || missing+=("$name")
done
((${#missing[@]})) || exit 0

prepare_apt "${missing[*]}"
apt-get update
download=$(mktemp --directory)
trap 'rm -r "$download"' EXIT
cd "$download"
for name in "${missing[@]}"; do
    needs=$(apt-cache show --no-all-versions "$name" | sed -n 's/^Depends: //p')
    apt-get satisfy --yes --no-install-recommends "$needs"
    apt-get -o APT::Sandbox::User=root download "$name"
    dpkg-deb --extract "$name"_*.deb "$name"
    mkdir -p $systems
    mv "$name" $systems/
done
