#!/usr/bin/env bash
# Run a command in a fresh clone on a bare machine: Debian in a directory, an ordinary user, an empty environment, no
# local wheels, processes of its own. Needs root and debootstrap.
#
#   bare_machine.sh SUITE DIRECTORY COMMAND...      bookworm has Python 3.11, trixie 3.13
#
# PACKAGES in the environment replaces what README asks for; files in DIRECTORY.files go to the clone.
set -euo pipefail
suite=$1 root=$2
shift 2
packages=${PACKAGES:-python3,python3-venv,python3-dev,make,g++,git},ca-certificates,procps,curl
debootstrap --variant=minbase --include="$packages" "$suite" "$root" > "$root.log" 2>&1 || { tail -5 "$root.log" >&2; exit 1; }
cp /etc/resolv.conf /etc/hosts "$root/etc/"
# Those of this machine, because a proxy may have one of its own.
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
chroot "$root" useradd --create-home user
git clone --quiet --no-hardlinks "$(git rev-parse --show-toplevel)" "$root/home/user/project"
if [ -d "$root.files" ]; then cp "$root.files"/* "$root/home/user/project/"; fi
chroot "$root" chown -R user: /home/user/project
export root
# The mounts and the processes end with the command.
exec unshare --mount --pid --fork --kill-child --propagation private bash -c '
  mount -t proc proc "$root/proc"
  mount --rbind /dev "$root/dev"
  mount --rbind /sys "$root/sys"
  exec env -i HOME=/home/user USER=user LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin \
    /usr/sbin/chroot --userspec=user:user "$root" bash -c "cd ~/project && exec \"\$@\"" bash "$@"' bash "$@"
