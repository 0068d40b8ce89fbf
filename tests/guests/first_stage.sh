#!/bin/busybox sh
# First process of a guest: finds the root file system and starts what the kernel's command line names.
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
[ -f /modules/order ] && while read -r module; do insmod "/modules/$module"; done </modules/order
tries=0
until [ -b /dev/vda ] && [ -b /dev/vdb ] && [ -b /dev/vdc ]; do
	tries=$((tries + 1))
	if [ "$tries" -gt 600 ]; then
		echo "guest: the disks did not appear"
		poweroff -f
	fi
	sleep 0.1
done
mount -t ext4 /dev/vda /root && mount -t ext4 -o ro /dev/vdb /root/payload || poweroff -f
for folder in proc sys dev; do mount -o move "/$folder" "/root/$folder"; done
init=$(sed -n 's/.*guest\.init=\([^ ]*\).*/\1/p' /root/proc/cmdline)
exec switch_root /root "$init"
