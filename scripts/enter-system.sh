#!/usr/bin/env bash
# enter-system.sh ROOT COMMAND...: runs a command with another system's programs, and this machine's
# folders but for those of a system. In a mount namespace of its own, whose mounts go with it:
#   unshare --mount --propagation=private scripts/enter-system.sh ROOT COMMAND...
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin # a job of a user has no folder of administrators
root=$1 here=$PWD
shift

mount --bind "$root" "$root"
# Of the module systems the one that needs no more than Tcl.
for folder in /* /var/lib/module-systems/environment-modules; do
    case $folder in
    /bin | /boot | /etc | /lib | /lib[0-9]* | /lost+found | /run | /sbin | /usr | /var) continue ;;
    esac
    [[ -d $folder && ! -L $folder ]] || continue
    mkdir -p "$root$folder"
    mount --rbind "$folder" "$root$folder"
done
# Names and certificates, so that downloads work there too.
for file in /etc/hosts /etc/resolv.conf /etc/ssl/certs/ca-certificates.crt; do
    [[ -e $file ]] || continue
    mkdir -p "$root${file%/*}"
    touch "$root$file"
    mount --bind "$file" "$root$file"
done
# Not a chroot: who enters a namespace is outside of that.
cd "$root"
mkdir -p before
pivot_root . before
umount --lazy /before
cd "$here"
exec "$@"
