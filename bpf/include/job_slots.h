/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the programs share: which accounting slot a cgroup has, and what each slot has run up.
 *
 * A slot is a job's row of totals. User space hands free slots to the kernel through a queue, so
 * that a new cgroup is accounted from its first instruction, before user space has heard of it.
 */
#ifndef EXPANSE_JOB_SLOTS_H
#define EXPANSE_JOB_SLOTS_H

#include "kernel_types.h"

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#define MAX_SLOTS 2048
#define MAX_CGROUPS 16384
#define MAX_CPUS 1024
#define COUNTERS 5

/* Slots that are never handed out. */
#define SLOT_SYSTEM 0	/* everything that belongs to no job */
#define SLOT_OVERFLOW 1 /* cgroups for which no slot was free */

/* The user-space names of the hierarchies, see kernel/accounting.py. */
enum hierarchy {
	HIERARCHY_UNIFIED,
	HIERARCHY_CPUSET,
	HIERARCHY_CPU,
	HIERARCHY_CPUACCT,
	HIERARCHY_IO,
	HIERARCHY_MEMORY,
	HIERARCHY_DEVICES,
	HIERARCHY_FREEZER,
	HIERARCHY_PIDS,
};

/* Set before loading: the verifier then drops every branch that is not taken. */
struct config {
	u32 hierarchy;	  /* enum hierarchy: where jobs are told apart */
	u32 hierarchy_id; /* the kernel's number of the same, as in /proc/PID/cgroup */
	u32 counters;	  /* bit i: hardware counter i is open */
	u32 cpus;	  /* CPUs that can exist, at most MAX_CPUS */
};

const volatile struct config config;

struct counter_total {
	u64 value;
	u64 enabled;
	u64 running;
};

/* One slot's totals. User space maps this; the order is that of kernel/accounting.py. */
struct totals {
	u64 run_ns;
	u64 switches;
	u64 wait_ns;
	u64 page_faults;
	u64 migrations;
	u64 forks;
	u64 execs;
	u64 exits;
	u64 changes;	/* grows with everything that can change the slot's list of processes */
	u64 exec_limit; /* set by user space: executions up to this count are reported */
	u64 unused[7];
	struct counter_total counters[COUNTERS];
};
_Static_assert(sizeof(struct totals) == 256, "user space reads fixed rows");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_SLOTS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct totals);
} totals SEC(".maps");

struct slot_of_cgroup {
	u32 slot;
	u32 confirmed; /* user space knows it as a job's: cgroups made below it are the job's as well */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_CGROUPS);
	/* Preallocated: before 6.1 the kernel warns of a tracing program that allocates, rightly. */
	__type(key, u64);
	__type(value, struct slot_of_cgroup);
} slots SEC(".maps");

/* The kernel's number of the controller whose hierarchy tells jobs apart; -1: the unified one. */
static __always_inline int subsystem(void)
{
	switch (config.hierarchy) {
	case HIERARCHY_CPUSET:
		return bpf_core_enum_value(enum cgroup_subsys_id, cpuset_cgrp_id);
	case HIERARCHY_CPU:
		return bpf_core_enum_value(enum cgroup_subsys_id, cpu_cgrp_id);
	case HIERARCHY_CPUACCT:
		return bpf_core_enum_value(enum cgroup_subsys_id, cpuacct_cgrp_id);
	case HIERARCHY_IO:
		return bpf_core_enum_value(enum cgroup_subsys_id, io_cgrp_id);
	case HIERARCHY_MEMORY:
		return bpf_core_enum_value(enum cgroup_subsys_id, memory_cgrp_id);
	case HIERARCHY_DEVICES:
		return bpf_core_enum_value(enum cgroup_subsys_id, devices_cgrp_id);
	case HIERARCHY_FREEZER:
		return bpf_core_enum_value(enum cgroup_subsys_id, freezer_cgrp_id);
	case HIERARCHY_PIDS:
		return bpf_core_enum_value(enum cgroup_subsys_id, pids_cgrp_id);
	default:
		return -1;
	}
}

/*
 * The id of the cgroup of a tracepoint's task, in the hierarchy that tells jobs apart. The
 * current-cgroup helper knows the unified hierarchy alone, and on a hybrid host that one may have
 * everything in its root.
 */
static __always_inline u64 cgroup_of(struct task_struct *task)
{
	struct css_set *set = task->cgroups;

	if (config.hierarchy == HIERARCHY_UNIFIED)
		return set->dfl_cgrp->kn->id;
	return set->subsys[subsystem()]->cgroup->kn->id;
}

/* The same for a task that is only an address. */
static __always_inline u64 cgroup_of_address(struct task_struct *task)
{
	struct css_set *set = BPF_CORE_READ(task, cgroups);
	struct cgroup_subsys_state *state = NULL;

	if (config.hierarchy == HIERARCHY_UNIFIED)
		return BPF_CORE_READ(set, dfl_cgrp, kn, id);
	bpf_core_read(&state, sizeof(state), &set->subsys[subsystem()]);
	return BPF_CORE_READ(state, cgroup, kn, id);
}

static __always_inline u32 slot_of(u64 cgroup)
{
	struct slot_of_cgroup *found = bpf_map_lookup_elem(&slots, &cgroup);

	return found ? found->slot : SLOT_SYSTEM;
}

#endif
