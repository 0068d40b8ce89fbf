// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The yardstick of bench/switch_hook.py and bench/hook_instructions.py: programs that do nothing. */
#include "kernel_types.h"

#include <bpf/bpf_helpers.h>

SEC("tp_btf/sched_switch")
int on_switch(void *unused)
{
	return 0;
}

/* Of the type of those that user space runs itself. */
SEC("raw_tp")
int run(void *unused)
{
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
