# shellcheck shell=bash
# What the scripts that install things for the tests share; they read this file.

fail() {
    echo "error: $*" >&2
    exit 1
}

# Make sure that packages can be installed here: $1 is what is missing.
prepare_apt() {
    ((EUID == 0)) || fail "$1 missing, and only root can install it: run this with sudo"
    command -v apt-get >/dev/null || fail "$1 missing, and there is no apt-get: install it by hand"
    export DEBIAN_FRONTEND=noninteractive
}

# Make sure that `make_system` works: $1 is what is missing. Sets `keyring` and `mirror`.
prepare_debootstrap() {
    prepare_apt "$1"
    keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    if ! command -v debootstrap >/dev/null || ! [[ -e $keyring ]]; then
        apt-get update
        apt-get install --yes --no-install-recommends debootstrap debian-archive-keyring
    fi
    # The mirror that this machine uses; without one, debootstrap knows where Debian is.
    # shellcheck disable=SC2016 # the dollars are apt-get's
    mirror=$(apt-get indextargets --format '$(LABEL) $(REPO_URI)' 'Created-By: Packages' |
        sed -n '/^Debian /{s///p;q}')
}

# make_system ROOT SUITE PACKAGES: makes a small Debian of a release, in a folder that is new.
make_system() {
    # What it mounts goes with its namespace, however it ends.
    unshare --mount --propagation=private \
        debootstrap --variant=minbase --keyring="$keyring" --include="$3" "$2" "$1" ${mirror:+"$mirror"}
}

# The same with an Ubuntu. Its keys come from Debian, by a checksum of Debian's signed index.
make_ubuntu() {
    local keys=$1.keys sum=b2e7ed48431bf9e7978ae810bbdaf253093570d6e3f864e575b7c13554b81174
    local pool=${mirror:-http://deb.debian.org/debian/}pool/main/u/ubuntu-keyring
    mkdir -p "$keys"
    curl --fail --silent --show-error --location --output "$keys/keys.deb" \
        "$pool/ubuntu-keyring_2023.11.28.1-0.2_all.deb"
    sha256sum --check --quiet <<<"$sum $keys/keys.deb" || fail "the keys of Ubuntu are not those that were seen"
    dpkg-deb --extract "$keys/keys.deb" "$keys"
    # One script makes all releases; a debootstrap that is older than a release has no link to it.
    unshare --mount --propagation=private \
        debootstrap --variant=minbase --keyring="$keys/usr/share/keyrings/ubuntu-archive-keyring.gpg" \
        --components=main,universe --include="$3" "$2" "$1" http://archive.ubuntu.com/ubuntu gutsy
    rm -r "$keys"
}
