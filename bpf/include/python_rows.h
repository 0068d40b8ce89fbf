/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Free rows of the table of counted stacks, in a queue that user space fills. For programs that cannot sleep. */
#ifndef EXPANSE_PYTHON_ROWS_H
#define EXPANSE_PYTHON_ROWS_H

#include "python_walk.h"

struct {
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__uint(max_entries, MAX_STACKS);
	__type(value, u32);
} free_rows SEC(".maps");

static __always_inline bool take_row(u32 *row, struct python_control *shared)
{
	return !bpf_map_pop_elem(&free_rows, row);
}

static __always_inline void give_back_row(u32 *row, struct python_control *shared)
{
	bpf_map_push_elem(&free_rows, row, 0);
}

#endif
