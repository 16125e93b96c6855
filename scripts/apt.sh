# shellcheck shell=bash
# Functions of the scripts that install programs for the tests. They source this file.

fail() {
    echo "error: $*" >&2
    exit 1
}

# prepare_apt MISSING: fails if apt-get cannot install packages here.
prepare_apt() {
    ((EUID == 0)) || fail "$1 missing, and only root can install it: run this with sudo"
    command -v apt-get >/dev/null || fail "$1 missing, and there is no apt-get: install it by hand"
    export DEBIAN_FRONTEND=noninteractive
}

# prepare_debootstrap MISSING: installs what `make_system` needs. Sets `keyring` and `mirror`.
prepare_debootstrap() {
    prepare_apt "$1"
    keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    if ! command -v debootstrap >/dev/null || ! [[ -e $keyring ]]; then
        apt-get update
        apt-get install --yes --no-install-recommends debootstrap debian-archive-keyring
    fi
    # The mirror of this machine. Without one, debootstrap uses its own.
    # shellcheck disable=SC2016 # the dollars are apt-get's
    mirror=$(apt-get indextargets --format '$(LABEL) $(REPO_URI)' 'Created-By: Packages' |
        sed -n '/^Debian /{s///p;q}')
}

# make_system ROOT SUITE PACKAGES: installs a small Debian of a release in a new folder.
make_system() {
    # The kernel removes its mounts with the namespace, even after a failure.
    unshare --mount --propagation=private \
        debootstrap --variant=minbase --keyring="$keyring" --include="$3" "$2" "$1" ${mirror:+"$mirror"}
}

# make_ubuntu ROOT SUITE PACKAGES: the same with Ubuntu. Debian has Ubuntu's keys; the checksum is from
# Debian's signed index.
make_ubuntu() {
    local keys=$1.keys sum=b2e7ed48431bf9e7978ae810bbdaf253093570d6e3f864e575b7c13554b81174
    local pool=${mirror:-http://deb.debian.org/debian/}pool/main/u/ubuntu-keyring
    mkdir -p "$keys"
    curl --fail --silent --show-error --location --output "$keys/keys.deb" \
        "$pool/ubuntu-keyring_2023.11.28.1-0.2_all.deb"
    sha256sum --check --quiet <<<"$sum $keys/keys.deb" || fail "ubuntu-keyring does not match its checksum: use another mirror"
    dpkg-deb --extract "$keys/keys.deb" "$keys"
    # debootstrap has the same script for all releases of Ubuntu, but does not know newer names.
    unshare --mount --propagation=private \
        debootstrap --variant=minbase --keyring="$keys/usr/share/keyrings/ubuntu-archive-keyring.gpg" \
        --components=main,universe --include="$3" "$2" "$1" http://archive.ubuntu.com/ubuntu gutsy
    rm -r "$keys"
}
