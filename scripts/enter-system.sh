#!/usr/bin/env bash
# enter-system.sh ROOT COMMAND...: runs a command with the programs of another system, and with the
# folders of this machine that are not part of its system. Run it in a new mount namespace:
#   unshare --mount --propagation=private scripts/enter-system.sh ROOT COMMAND...
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin # these folders are not on a user's PATH
root=$1 here=$PWD
shift

mount --bind "$root" "$root"
# Only the module system that needs nothing except Tcl.
for folder in /* /var/lib/module-systems/environment-modules; do
    case $folder in
    /bin | /boot | /etc | /lib | /lib[0-9]* | /lost+found | /run | /sbin | /usr | /var) continue ;;
    esac
    [[ -d $folder && ! -L $folder ]] || continue
    mkdir -p "$root$folder"
    mount --rbind "$folder" "$root$folder"
done
# Host names and certificates, for downloads.
for file in /etc/hosts /etc/resolv.conf /etc/ssl/certs/ca-certificates.crt; do
    [[ -e $file ]] || continue
    mkdir -p "$root${file%/*}"
    touch "$root$file"
    mount --bind "$file" "$root$file"
done
# A chroot is not enough: a process that enters the namespace would be outside of it.
cd "$root"
mkdir -p before
pivot_root . before
umount --lazy /before
cd "$here"
exec "$@"
