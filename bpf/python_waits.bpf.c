// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Python stacks of waiting threads: user space reads this iterator a few times a second, and each thread
 * that sleeps is counted with the stack it sleeps in. Nothing is stopped. A thread that has not run since
 * the last visit has the same stack and is not read again.
 */
#define READ(destination, size, address) bpf_copy_from_user_task(destination, size, (const void *)(address), task, 0)
#include "python_walk.h"

#define MAX_VISIT_ROWS 4096

/*
 * Not a queue like the sampler's, which a program that may sleep cannot use before 6.4. There is one reader
 * at a time. Mapped by user space: row number i that is given out is at i % MAX_VISIT_ROWS.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_VISIT_ROWS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, u64);
} visit_rows SEC(".maps");

static __always_inline bool take_row(u32 *row, struct python_control *shared)
{
	u32 key = shared->visit_rows_taken & (MAX_VISIT_ROWS - 1);
	u64 *free = bpf_map_lookup_elem(&visit_rows, &key);

	if (!free || shared->visit_rows_taken == shared->visit_rows_up)
		return false;
	shared->visit_rows_taken++;
	*row = *free;
	return true;
}

static __always_inline void give_back_row(u32 *row, struct python_control *shared)
{
	shared->visit_rows_taken--;
}

#define TASK_SLEEPING 3 /* interruptible or not */
#define PF_KTHREAD 0x200000

#if defined(__TARGET_ARCH_arm64)
#define SYSCALL_FUTEX 98
#define SYSCALL_FUTEX_WAIT 455
#else
#define SYSCALL_FUTEX 202
#define SYSCALL_FUTEX_WAIT 455
#endif

/* There is one reader at a time, in process context: no table by CPU, which would change under it. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct walk);
} visits SEC(".maps");

/* What came of a thread the last time. Ids of threads are used again, so it is told by its birth as well. */
struct seen {
	u64 switches;
	u64 born;
	u64 space;
	u32 slot;
	u32 outcome;
	u32 stack_epoch;
	u32 row; /* when RESOLVED */
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, u32);
	__type(value, struct seen);
} seen_threads SEC(".maps");

struct visit {
	struct walk *walk;
	struct task_struct *task;
	struct python_slot *row;
};

static long next_thread(u32 i, struct visit *visit)
{
	return search_step(visit->walk, visit->task);
}

static __noinline u32 describe_code(struct walk *walk, struct task_struct *task, struct python_slot *row)
{
	u32 outcome;

	if (!affordable(row, walk->now, &row->codes, MAX_NEW_CODES))
		return OVER_BUDGET;
	outcome = describe(walk, task, MAX_CPUS);
	__sync_fetch_and_add(&row->codes, walk->described / 256);
	return outcome;
}

static long next_frame(u32 i, struct visit *visit)
{
	struct walk *walk = visit->walk;
	struct task_struct *task = visit->task;

	return FRAME_STEP(walk, task, describe_code(walk, task, visit->row));
}

/* Grows whenever the task leaves a CPU or comes to one. */
static __always_inline u64 switches_of(struct task_struct *task)
{
	return task->nvcsw + task->nivcsw + task->sched_info.pcount;
}

/* One that is on its way to sleep can still turn back, and run, without any switch. */
static __always_inline bool sleeps(struct task_struct *task)
{
	return task->__state & TASK_SLEEPING && !task->on_cpu;
}

/* The address of the futex that the task sleeps on; 0: it does something else. */
static __always_inline u64 futex_of(struct task_struct *task)
{
	struct pt_regs *registers = (struct pt_regs *)bpf_task_pt_regs(task);

#if defined(__TARGET_ARCH_arm64)
	u64 call = BPF_CORE_READ(registers, syscallno);
	u64 address = BPF_CORE_READ(registers, orig_x0);
#else
	u64 call = BPF_CORE_READ(registers, orig_ax);
	u64 address = BPF_CORE_READ(registers, di);
#endif
	return call == SYSCALL_FUTEX || call == SYSCALL_FUTEX_WAIT ? address : 0;
}

/* Whether the job, and all together, may have so many more reads in this second. */
static __always_inline bool pay(struct python_slot *row, u64 now, u32 reads)
{
	u32 everybody = SLOT_SYSTEM;
	struct python_slot *all = bpf_map_lookup_elem(&python_slots, &everybody);

	if (!all)
		return false;
	renew_budget(all, now);
	renew_budget(row, now);
	__sync_fetch_and_add(&row->reads, reads);
	if (row != all)
		__sync_fetch_and_add(&all->reads, reads);
	return row->reads <= MAX_READS && all->reads <= MAX_READS_ALL;
}

static __always_inline u32 visit_thread(struct task_struct *task, struct seen *seen, struct python_slot *row,
					struct python_control *shared)
{
	u32 key = 0, host_pid = task->tgid, host_tid = task->pid, outcome;
	struct walk *walk = bpf_map_lookup_elem(&visits, &key);
	struct visit visit = {.walk = walk, .task = task, .row = row};

	if (!walk)
		return LOST;
	outcome = begin(walk, task, host_pid, seen->slot, row, shared);
	seen->space = walk->space;
	if (outcome != RESOLVED)
		return outcome;
	if (!pay(row, walk->now, 0))
		return OVER_BUDGET;
	if (!search_begin(walk, task, host_tid))
		bpf_loop(MAX_THREADS, next_thread, &visit, 0);
	outcome = search_end(walk, task, host_tid);
	pay(row, walk->now, 10 + walk->looked);
	if (outcome != RESOLVED)
		return outcome;
	walk->stack.flags = FLAG_WAITING | gil_of(walk, task, futex_of(task));
	bpf_loop(MAX_STEPS, next_frame, &visit, 0);
	pay(row, walk->now, 4 * walk->stack.depth);
	/* It was not stopped: what was read is one stack only if it has not run in between. */
	if (!sleeps(task) || switches_of(task) != seen->switches)
		return CHANGED;
	if (walk->outcome != RESOLVED)
		return walk->outcome;
	return count(walk, row, shared, shared->visit_ns, &seen->row);
}

/* Visits a thread; one that has not run since the last visit is where it was, and is not read again. */
static __always_inline u32 visit(struct task_struct *task, u32 slot, struct python_slot *row,
				 struct python_control *shared)
{
	u32 host_tid = task->pid, host_pid = task->tgid;
	struct seen *last = bpf_map_lookup_elem(&seen_threads, &host_tid);
	struct process *process = bpf_map_lookup_elem(&processes, &host_pid);
	struct seen now = {
		.switches = switches_of(task),
		.born = task->start_boottime,
		.slot = slot,
		.stack_epoch = shared->stack_epoch,
	};

	if (last && process && last->switches == now.switches && last->born == now.born &&
	    last->space == process->space && last->slot == slot && last->stack_epoch == now.stack_epoch)
		return last->outcome == RESOLVED ? add_to(last->row, shared->visit_ns) : last->outcome;
	now.outcome = visit_thread(task, &now, row, shared);
	if (now.outcome == RESOLVED || now.outcome == NATIVE_THREAD || now.outcome == NO_FRAMES)
		bpf_map_update_elem(&seen_threads, &host_tid, &now, 0);
	return now.outcome;
}

SEC("iter.s/task")
int on_visit(struct bpf_iter__task *context)
{
	struct python_control *shared = the_control();
	struct task_struct *task = context->task;
	u32 slot = SLOT_SYSTEM, outcome;
	struct python_slot *row;

	if (!task || !shared || task->flags & PF_KTHREAD || !sleeps(task))
		return 0;
	row = row_of(task, task->tgid, cgroup_of(task), shared, &slot);
	if (!row)
		return 0;
	outcome = visit(task, slot, row, shared);
	__sync_fetch_and_add(&row->visits[outcome & (OUTCOMES - 1)], 1);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
