#!/bin/bash
# Runs the test's command in the guest and hands back its exit code, its output and the files in /out.
# As process 1 it makes the machine usable first; under systemd it is a service.
export PATH=/opt/expanse-ebpf/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/root LC_ALL=C.UTF-8 PYTHONUNBUFFERED=1

mount_v1() {
	for controllers in cpuset cpu,cpuacct memory devices freezer blkio pids; do
		mkdir -p "/sys/fs/cgroup/$controllers"
		mount -t cgroup -o "$controllers" cgroup "/sys/fs/cgroup/$controllers" || rmdir "/sys/fs/cgroup/$controllers"
	done
}

if [ $$ = 1 ]; then
	mount -t tmpfs tmpfs /run
	mount -t tmpfs tmpfs /tmp -o mode=1777
	mkdir -p /dev/shm /dev/pts
	mount -t tmpfs tmpfs /dev/shm -o mode=1777
	mount -t devpts devpts /dev/pts
	mount -t tracefs tracefs /sys/kernel/tracing
	hostname guest
	ip link set lo up
	case $(sed -n 's/.*guest\.cgroup=\([^ ]*\).*/\1/p' /proc/cmdline) in
	v2) mount -t cgroup2 cgroup2 /sys/fs/cgroup ;;
	v1)
		mount -t tmpfs tmpfs /sys/fs/cgroup
		mount_v1
		;;
	hybrid)
		mount -t tmpfs tmpfs /sys/fs/cgroup
		mount_v1
		mkdir /sys/fs/cgroup/unified
		mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified
		;;
	esac
fi

cd /scratch
# Not exec: what comes after must run whatever the command does.
bash /payload/command </dev/null >/dev/vport0p1 2>&1
echo $? >/out/.exit
dmesg >/out/.dmesg
tar -C /out -cf /dev/vdc .
sync
[ $$ = 1 ] && exec /usr/bin/busybox poweroff -f
systemctl poweroff --force --force
