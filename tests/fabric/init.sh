#!/bin/sh
# Process 1 of an emulated machine, twice: from the initramfs (busybox: modules, then the root over 9p), then from that root
# (soft-RoCE, then commands for the tests). Kernel command line: guest=N, and share.K=FOLDER for each folder of the host that
# is mounted read-only at the same path.
if [ "$1" != commands ]; then
    /bin/busybox --install -s /bin
    export PATH=/bin
    mkdir -p /proc /sys /low /top /new
    mount -t proc proc /proc
    for module in /modules/*.ko; do insmod "$module"; done
    mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro root /low
    mount -t tmpfs top /top
    mkdir /top/up /top/work
    mount -t overlay -o lowerdir=/low,upperdir=/top/up,workdir=/top/work new /new
    cp /init /new/init.sh
    umount /proc
    exec switch_root /new /bin/sh /init.sh commands
fi

export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm /commands
mount -t tmpfs shm /dev/shm
share() { mkdir -p "$2" && mount -t 9p -o "trans=virtio,version=9p2000.L,msize=512000,$3" "$1" "$2"; }
share commands /commands cache=none
# shellcheck disable=SC2013 # words are meant
for word in $(cat /proc/cmdline); do
    case $word in
    guest=*) number=${word#*=} ;;
    share.*) share "${word%%=*}" "${word#*=}" cache=loose,ro ;;
    esac
done
hostname "guest$number"
# Names resolve to the first network: like on a cluster, a cut of the fabric does not cut it.
printf '127.0.0.1 localhost\n10.9.0.1 guest1\n10.9.0.2 guest2\n' >/etc/hosts
# shellcheck disable=SC3045 # dash has it
ulimit -l unlimited
for module in virtio_net ib_umad ib_uverbs rdma_ucm rdma_rxe; do modprobe "$module" || echo "no module $module"; done
ip link set lo up
for network in 0 1; do # the last number of a MAC address is the guest's, the one before the network's
    own=$(grep -l "52:54:00:09:0$network:0$number" /sys/class/net/*/address)
    own=${own%/address}
    own=${own##*/}
    [ "$network" = 0 ] && name=eth0 || name=roce0
    [ "$own" = "$name" ] || ip link set "$own" name "$name"
    [ "$network" = 0 ] || ip link set "$name" mtu 9000
    ip link set "$name" up
    ip addr add "10.9.$network.$number/24" dev "$name"
done
rdma link add rxe0 type rxe netdev roce0
echo "guest$number is ready after $(cut -d' ' -f1 /proc/uptime) s"
touch /commands/ready
# NAME.sh appears, runs beside others, and leaves NAME.out and, last, NAME.rc.
while :; do
    for command in /commands/*.sh; do
        [ -e "$command" ] || continue
        name=${command%.sh}
        mv "$command" "$name.run"
        (sh "$name.run" >"$name.out" 2>"$name.err"; echo $? >"$name.end"; mv "$name.end" "$name.rc") &
    done
    sleep 0.2
done
