#!/usr/bin/env bash
# Build what the emulated machines boot, under a folder: Debian with soft-RoCE's tools, its kernel, and an initramfs. What is
# there already is kept. Needs root, Debian's apt-get, debootstrap and busybox-static; takes 2 to 6 minutes and 1.3 GB.
#   tests/fabric/build.sh FOLDER
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
work=$1
root=$work/root
# shellcheck source=/dev/null
suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-bookworm}")
# The last line is what this machine's Python needs: the guests run it from a read-only mount.
packages=iproute2,kmod,rdma-core,ibverbs-providers,perftest,infiniband-diags
packages+=,libsqlite3-0,libssl3,libffi8,libbz2-1.0,liblzma5,libreadline8,libncursesw6,libuuid1,libgdbm6,zlib1g

make_root() {
    debootstrap --variant=minbase --include="$packages" "$suite" "$root" >"$work/debootstrap.log" 2>&1 ||
        { tail -5 "$work/debootstrap.log" >&2 && return 1; }
    local image
    image=$(apt-cache depends linux-image-amd64 | awk '/Depends:/ { print $2; exit }')
    mkdir -p "$work/packages"
    (cd "$work/packages" && apt-get download -qq "$image")
    dpkg -x "$work"/packages/"$image"_*.deb "$work/kernel" # not installed: no boot loader, no hooks
    mkdir -p "$root/lib/modules"
    cp -a "$work/kernel/lib/modules/." "$root/lib/modules/"
    chroot "$root" depmod "${image#linux-image-}"
    touch "$root/.complete"
}

make_initramfs() {
    local release number=100 module
    release=$(basename "$root"/lib/modules/*)
    rm -rf "$work/initramfs"
    mkdir -p "$work/initramfs/bin" "$work/initramfs/modules"
    cp /bin/busybox "$work/initramfs/bin/"
    { echo '#!/bin/busybox sh' && tail -n +2 "$here/init.sh"; } >"$work/initramfs/init"
    chmod +x "$work/initramfs/init"
    # Those that mount the root, in the order in which they are loaded.
    for module in virtio_pci 9p 9pnet_virtio overlay; do
        chroot "$root" modprobe --set-version "$release" --show-depends "$module" | awk '$1 == "insmod" { print $2 }'
    done | awk '!seen[$0]++' | while read -r module; do
        cp "$root$module" "$work/initramfs/modules/$((number++))-$(basename "$module")"
    done
    (cd "$work/initramfs" && find . | /bin/busybox cpio -o -H newc 2>/dev/null) >"$work/initramfs.cpio"
    cp "$work/kernel/boot/vmlinuz-$release" "$work/vmlinuz"
}

mkdir -p "$work"
[[ -e $root/.complete ]] || { rm -rf "$root" && make_root; }
make_initramfs
