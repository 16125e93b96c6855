#!/usr/bin/env bash
# Makes two systems for the tests of containers, on Debian and Ubuntu, in one folder. It also installs
# debootstrap, and changes nothing else on this machine.
#   root  Debian 13 with Apptainer; the package is from Debian unstable, and does not run on Debian 12
#   base  Debian 12 with Python and pip: the base of images, so that no registry is needed
set -euo pipefail
# shellcheck source=/dev/null
. "$(dirname "$0")/apt.sh"

export PATH=$PATH:/usr/sbin:/sbin
systems=/opt/apptainer-tests # tests/slurm/apptainer.py has this path too
[[ ! -d $systems ]] || exit 0

prepare_debootstrap "$systems"
new=$systems.new
rm -rf --one-file-system "$new"
mkdir -p "$new"
make_system "$new/base" bookworm python3-pip,python3-venv >"$new/base.log" 2>&1 &
make_system "$new/root" trixie ca-certificates,containernetworking-plugins,libseccomp2,libsqlite3-0,squashfs-tools,squashfuse,uidmap
wait $! || fail "debootstrap failed: $(tail -n 3 "$new/base.log")"
# Root without all capabilities cannot copy devices or files of other users. apt-get makes some.
chroot "$new/base" apt-get clean
rm -r "$new/base/dev" "$new/base.log"
mkdir "$new/base/dev"
chown --recursive --no-dereference root:root "$new/base"
# pip installs only packages in /mnt, which the tests mount while they build an image.
printf '[global]\nno-index = true\nfind-links = /mnt\n' >"$new/base/etc/pip.conf"

apt=$new/apt
mkdir -p "$apt"/{lists/partial,cache/archives/partial}
# shellcheck disable=SC2154 # prepare_debootstrap sets it
sed "s|^deb |deb [signed-by=$keyring] |; s/ trixie / unstable /" "$new/root/etc/apt/sources.list" >"$apt/sources.list"
from_unstable() {
    apt-get -o APT::Sandbox::User=root -o Dir::Cache="$apt/cache" -o Dir::State::Lists="$apt/lists" \
        -o Dir::Etc::SourceList="$apt/sources.list" -o Dir::Etc::SourceParts=/dev/null "$@"
}
from_unstable update
cd "$new/root"
from_unstable download apptainer
chroot . /bin/sh -c 'dpkg --install apptainer_*.deb && apt-get clean'
rm -r apptainer_*.deb "$apt"
mv "$new" "$systems"
