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
