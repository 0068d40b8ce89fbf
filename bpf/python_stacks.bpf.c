// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Python stacks of running threads, sampled by a clock on every CPU and counted here as whole stacks.
 *
 * The thread is interrupted in the middle of what it does, and nothing of its process that matters to
 * its own stack can change until this is done: what is read is one moment's stack.
 */
#define READ(destination, size, address) bpf_probe_read_user(destination, size, (const void *)(address))
#include "python_rows.h"

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct walk);
} walks SEC(".maps");

static __always_inline struct walk *the_walk(void)
{
	u32 key = 0;

	return bpf_map_lookup_elem(&walks, &key);
}

/*
 * Functions of their own, and not static: the verifier looks at each once, and takes its result for
 * anything. So loops of them stay small for it, on every kernel.
 */
__noinline int next_thread(void)
{
	struct walk *walk = the_walk();

	return walk ? search_step(walk, NULL) : 1;
}

__noinline int describe_code(u32 slot)
{
	struct walk *walk = the_walk();
	struct python_slot *row = bpf_map_lookup_elem(&python_slots, &slot);
	u32 outcome;

	if (!walk || !row)
		return LOST;
	if (!affordable(row, walk->now, &row->codes, MAX_NEW_CODES))
		return OVER_BUDGET;
	outcome = describe(walk, NULL, bpf_get_smp_processor_id() & (MAX_CPUS - 1));
	__sync_fetch_and_add(&row->codes, walk->described / 256);
	return outcome;
}

__noinline int next_frame(void)
{
	struct walk *walk = the_walk();

	return walk ? FRAME_STEP(walk, NULL, describe_code(walk->slot)) : 1;
}

__noinline int find_thread(void)
{
	u32 i;

	for (i = 0; i < MAX_THREADS; i++)
		if (next_thread())
			break;
	return 0;
}

__noinline int walk_frames(void)
{
	u32 i;

	for (i = 0; i < MAX_STEPS; i++)
		if (next_frame())
			break;
	return 0;
}

static __always_inline u32 sample(struct task_struct *task, u32 host_pid, u32 host_tid, u32 slot,
				  struct python_slot *row, struct python_control *shared)
{
	struct walk *walk = the_walk();
	u32 outcome, row_of_stack;

	if (!walk)
		return LOST;
	outcome = begin(walk, task, host_pid, slot, row, shared);
	if (outcome != RESOLVED)
		return outcome;
	if (!search_begin(walk, NULL, host_tid))
		find_thread();
	outcome = search_end(walk, NULL, host_tid);
	if (outcome != RESOLVED)
		return outcome;
	walk->stack.flags = gil_of(walk, NULL, 0);
	walk_frames();
	if (walk->outcome != RESOLVED)
		return walk->outcome;
	return count(walk, row, shared, shared->period_ns, &row_of_stack);
}

SEC("perf_event")
int on_sample(void *unused)
{
	u64 ids = bpf_get_current_pid_tgid();
	u32 host_pid = ids >> 32, host_tid = ids, slot = SLOT_SYSTEM, outcome;
	struct python_control *shared = the_control();
	struct task_struct *task;
	struct python_slot *row;

	if (!host_tid || !shared)
		return 0;
	task = (struct task_struct *)bpf_get_current_task();
	if (!BPF_CORE_READ(task, mm))
		return 0; /* a thread of the kernel's */
	row = row_of(task, host_pid, cgroup_of_address(task), shared, &slot);
	if (!row)
		return 0;
	outcome = sample(task, host_pid, host_tid, slot, row, shared);
	__sync_fetch_and_add(&row->samples[outcome & (OUTCOMES - 1)], 1);
	return 0;
}

/* ---- processes that come, change and go ---- */

SEC("tp_btf/sched_process_fork")
int BPF_PROG(on_python_fork, struct task_struct *parent, struct task_struct *child)
{
	u32 from = parent->tgid, to = child->tgid;
	struct python_control *shared = the_control();
	struct process *process;

	if (!shared || child->pid != child->tgid)
		return 0;
	process = bpf_map_lookup_elem(&processes, &from);
	if (!process && shared->by_process && is_wanted((struct task_struct *)bpf_get_current_task(), from, shared)) {
		new_space(from); /* wanted, and not seen to run so far */
		process = bpf_map_lookup_elem(&processes, &from);
	}
	if (process)
		bpf_map_update_elem(&processes, &to, process, 0);
	else if (bpf_map_lookup_elem(&processes, &to))
		bpf_map_delete_elem(&processes, &to);
	return 0;
}

SEC("tp_btf/sched_process_exec")
int BPF_PROG(on_python_exec, struct task_struct *task)
{
	struct task_struct *current = (struct task_struct *)bpf_get_current_task();
	struct python_control *shared = the_control();
	u32 host_pid = task->tgid, slot;
	struct python_slot *row;
	struct space *space;
	u64 id;

	if (!shared)
		return 0;
	row = row_of(current, host_pid, cgroup_of(task), shared, &slot);
	if (!row) {
		if (bpf_map_lookup_elem(&processes, &host_pid))
			bpf_map_delete_elem(&processes, &host_pid);
		return 0;
	}
	id = new_space(host_pid);
	space = bpf_map_lookup_elem(&spaces, &id);
	if (space)
		ask(space, id, current, slot, row, shared, bpf_ktime_get_ns());
	return 0;
}

SEC("tp_btf/sched_process_exit")
int BPF_PROG(on_python_exit, struct task_struct *task)
{
	struct python_control *shared = the_control();
	u32 host_pid = task->tgid, id;

	/* Counted down before this point: 0 for the last thread of the process. */
	if (!shared || task->signal->live.counter != 0 || !bpf_map_lookup_elem(&processes, &host_pid))
		return 0;
	bpf_map_delete_elem(&processes, &host_pid);
	id = visible_id(BPF_CORE_READ((struct task_struct *)bpf_get_current_task(), group_leader, thread_pid), shared);
	bpf_map_delete_elem(&wanted, &id);
	return 0;
}

/* Run by user space once, in its own process: the namespace in which it reads process ids. */
SEC("raw_tp")
int identify(void *unused)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task();
	struct pid *pid = BPF_CORE_READ(task, thread_pid);
	struct python_control *shared = the_control();
	u32 level;

	if (!shared)
		return 0;
	level = BPF_CORE_READ(pid, level);
	shared->level = level;
	shared->namespace = (u64)id_at(pid, level).ns;
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
