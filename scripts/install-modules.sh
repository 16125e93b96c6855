#!/usr/bin/env bash
# Installs what the tests of module lines need on Debian and Ubuntu: both module systems. Their
# packages refuse to be installed together, and would change every login on this machine, so only
# what they depend on is installed. They themselves lie unpacked in a folder for each, and the tests
# lay that folder over /usr and /etc in the namespaces of their cluster.
set -euo pipefail
# shellcheck source=/dev/null
. "$(dirname "$0")/apt.sh"

systems=/var/lib/module-systems # where tests/slurm/modules.py looks
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
