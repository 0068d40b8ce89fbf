// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The yardstick of bench/switch_hook.py: a program that does nothing, on the same hook. */
#include "kernel_types.h"

#include <bpf/bpf_helpers.h>

SEC("tp_btf/sched_switch")
int on_switch(void *unused)
{
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
