// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The yardstick of bench.python_stacks: what a sample costs when nothing is done with it. */
#include "kernel_types.h"

#include <bpf/bpf_helpers.h>

SEC("perf_event")
int on_nothing(void *unused)
{
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
