#!/usr/bin/env bash
# Install the Debian packages that tests need beside Python's, where that is possible; else say which are missing. The tests
# that need them then skip and say so; with CI=true they fail. With the argument fabric: those of tests/fabric alone.
set -euo pipefail

wanted=(
    # tests/system/slurm
    slurm-wlm slurm-client munge slurmdbd slurm-wlm-mysql-plugin mariadb-server libslurm-dev gcc iproute2
    # tests/system/containers
    podman netavark aardvark-dns catatonit iptables debootstrap
    # tests/system/search
    postgresql util-linux chromium chromium-driver
    # tests/system/tracking
    prometheus
    # DeepSpeed's CPU Adam and asynchronous I/O, compiled at first use
    g++ libaio-dev
)
# tests/unit/test_kubernetes_*: any kubectl does; with Debian's 1.20 the image of a TrainJob cannot be set.
command -v kubectl >/dev/null || wanted+=(kubernetes-client)
[[ ${1:-} != fabric ]] || wanted=(qemu-system-x86 debootstrap busybox-static)
missing=()
for package in "${wanted[@]}"; do
    [[ $(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
done
((${#missing[@]})) || exit 0
if ! command -v apt-get >/dev/null || ((EUID != 0)); then
    echo "for all system tests: as root, apt-get install ${missing[*]}"
    exit 0
fi
echo "installing ${missing[*]}"
# In run level 1 Debian's packages start no services; the tests start their own.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
{ apt-get update -qq && apt-get install -qq --no-install-recommends "${missing[@]}"; } >/dev/null 2>&1 ||
    echo "not all could be installed: ${missing[*]}"
