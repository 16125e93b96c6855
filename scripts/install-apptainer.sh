#!/usr/bin/env bash
# Makes what the tests of the container need on Debian and Ubuntu, in a folder of its own: nothing
# else of this machine changes, but for debootstrap, which is installed.
#   root  Debian 13 with Apptainer, whose package in Debian unstable runs there, but not on Debian 12
#   base  Debian 12 with Python and pip, for images to be built on: no registry is asked
set -euo pipefail
# shellcheck source=/dev/null
. "$(dirname "$0")/apt.sh"

export PATH=$PATH:/usr/sbin:/sbin
systems=/opt/apptainer-tests # tests/slurm/apptainer.py looks here too
[[ ! -d $systems ]] || exit 0

prepare_debootstrap "$systems"
new=$systems.new
rm -rf --one-file-system "$new"
mkdir -p "$new"
make_system "$new/base" bookworm python3-pip,python3-venv >"$new/base.log" 2>&1 &
make_system "$new/root" trixie ca-certificates,containernetworking-plugins,libseccomp2,libsqlite3-0,squashfs-tools,squashfuse,uidmap
wait $! || fail "debootstrap failed: $(tail -n 3 "$new/base.log")"
# A root without all rights can copy neither devices nor what other users own: apt-get makes such.
chroot "$new/base" apt-get clean
rm -r "$new/base/dev" "$new/base.log"
mkdir "$new/base/dev"
chown --recursive --no-dereference root:root "$new/base"
# No package from elsewhere: those that an image takes are bound to /mnt while it is built.
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
