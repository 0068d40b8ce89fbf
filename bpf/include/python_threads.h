/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Which processes are looked at and which interpreter they run; and the state that the interpreter keeps
 * for a thread, by which its frames are found.
 *
 * READ(destination, size, address) is defined by each program before it includes this: it reads the memory
 * of the process, and may use a `task` that is in scope.
 */
#ifndef EXPANSE_PYTHON_THREADS_H
#define EXPANSE_PYTHON_THREADS_H

#include "python_maps.h"

/* ---- which namespace's process ids ---- */

/* The id and its namespace, `level` namespaces below the host's. */
static __always_inline struct upid id_at(struct pid *pid, u32 level)
{
	struct upid entry = {};

	if (level <= 32) /* the kernel allows no more */
		bpf_core_read(&entry, bpf_core_type_size(struct upid),
			      (void *)pid + bpf_core_field_offset(struct pid, numbers) +
				      level * bpf_core_type_size(struct upid));
	return entry;
}

/* The process's id in user space's namespace; 0 when it is not visible there. */
static __always_inline u32 visible_id(struct pid *pid, const struct python_control *shared)
{
	struct upid entry;

	if (BPF_CORE_READ(pid, level) < shared->level)
		return 0;
	entry = id_at(pid, shared->level);
	return (u64)entry.ns == shared->namespace ? entry.nr : 0;
}

/* The id by which the process itself knows the thread. */
static __always_inline u32 own_id(struct pid *pid)
{
	return id_at(pid, BPF_CORE_READ(pid, level)).nr;
}

/* ---- which processes are looked at, and what is known of them ---- */

static __always_inline void ask(struct space *space, u64 id, struct task_struct *task, u32 slot,
				struct python_slot *row, const struct python_control *shared, u64 now)
{
	struct ask_record record = {.kind = ASK, .slot = slot, .space = id, .tries = space->tries};
	u32 most = space->state == STARTING ? 4 : 6;
	u32 tries = space->tries < most ? space->tries : most;

	if (!affordable(row, now, &row->asks, MAX_ASKS))
		return;
	record.host_pid = BPF_CORE_READ(task, tgid);
	record.pid = visible_id(BPF_CORE_READ(task, group_leader, thread_pid), shared);
	record.tid = visible_id(BPF_CORE_READ(task, thread_pid), shared);
	space->tries++;
	/* Libraries are mapped after the execution, by the process itself: 5 ms, 20 ms, ... 1.3 s, or 20 s. */
	space->again_ns = now + (5000000ULL << (2 * tries));
	bpf_ringbuf_output(&python_records, &record, sizeof(record), BPF_RB_FORCE_WAKEUP);
}

/* A new address space of process `host_pid`, of which nothing is known yet. */
static __always_inline u64 new_space(u32 host_pid)
{
	/* No other begins on this CPU at the same time. */
	struct process process = {.space = bpf_ktime_get_ns() << 10 | bpf_get_smp_processor_id()};
	struct space space = {.state = STARTING};

	bpf_map_update_elem(&spaces, &process.space, &space, 0);
	bpf_map_update_elem(&processes, &host_pid, &process, 0);
	return process.space;
}

/* With control.by_process: whether it is one of them. */
static __always_inline bool is_wanted(struct task_struct *task, u32 host_pid, const struct python_control *shared)
{
	u32 id;

	if (bpf_map_lookup_elem(&processes, &host_pid))
		return true;
	id = visible_id(BPF_CORE_READ(task, group_leader, thread_pid), shared);
	return id && bpf_map_lookup_elem(&wanted, &id);
}

/* Whether jobs' processes in this slot are looked at. */
static __always_inline bool selected(const struct python_slot *row, const struct python_control *shared)
{
	return row->selected ? row->selected == 1 : shared->all;
}

/* The row of the task's job, and its slot; NULL when the task is not looked at. */
static __always_inline struct python_slot *row_of(struct task_struct *task, u32 host_pid, u64 cgroup,
						  const struct python_control *shared, u32 *slot)
{
	struct python_slot *row;

	if (shared->by_process) {
		*slot = SLOT_SYSTEM;
		return is_wanted(task, host_pid, shared) ? bpf_map_lookup_elem(&python_slots, slot) : NULL;
	}
	*slot = slot_of(cgroup);
	row = bpf_map_lookup_elem(&python_slots, slot);
	return row && *slot > SLOT_OVERFLOW && selected(row, shared) ? row : NULL;
}

/* Begins a walk: RESOLVED when there is an interpreter to look into, else what the sample comes to. */
static __always_inline u32 begin(struct walk *walk, struct task_struct *task, u32 host_pid, u32 slot,
				 struct python_slot *row, struct python_control *shared)
{
	struct process *process = bpf_map_lookup_elem(&processes, &host_pid);
	struct pid *id = BPF_CORE_READ(task, thread_pid);
	struct space *space, fresh = {.state = STARTING};

	walk->now = bpf_ktime_get_ns();
	walk->space = process ? process->space : new_space(host_pid);
	space = bpf_map_lookup_elem(&spaces, &walk->space);
	if (!space) {
		bpf_map_update_elem(&spaces, &walk->space, &fresh, 0);
		space = bpf_map_lookup_elem(&spaces, &walk->space);
		if (!space)
			return LOST;
	}
	if (space->state != RESOLVED) {
		if (space->again_ns <= walk->now &&
		    (space->state == STARTING || space->state == NOT_PYTHON || space->state == UNREADABLE))
			ask(space, walk->space, task, slot, row, shared, walk->now);
		return space->state;
	}
	walk->runtime = space->runtime;
	walk->slot = slot;
	walk->stack.kind = STACK;
	walk->stack.slot = slot;
	walk->stack.layout = space->layout;
	walk->stack.pid = visible_id(BPF_CORE_READ(task, group_leader, thread_pid), shared);
	walk->stack.flags = 0;
	walk->stack.depth = 0;
	walk->tid = own_id(id);
#if defined(__TARGET_ARCH_arm64)
	walk->thread_pointer = BPF_CORE_READ(task, thread.uw.tp_value);
#else
	walk->thread_pointer = BPF_CORE_READ(task, thread.fsbase);
#endif
	walk->outcome = RESOLVED;
	walk->hash_a = shared->seed_a;
	walk->hash_b = shared->seed_b;
	hash_in(walk, walk->space);
	hash_in(walk, (u64)host_pid << 32 | slot);
	return RESOLVED;
}

/* ---- finding the thread state ---- */

/* Whether the thread state that was read into the block is this thread's. */
static __always_inline bool is_own(const struct walk *walk, const struct python_layout *at)
{
	u64 id = thread_word(walk, at->thread_id);

	if (at->thread_native_id != NOWHERE && thread_word(walk, at->thread_native_id) == walk->tid)
		return true;
		/* There is no other before 3.11, and before 3.11.2 a forked child has its parent's. */
#if defined(__TARGET_ARCH_arm64)
	/* pthread_self() lies below the thread pointer, by the size of libc's own structure. */
	return walk->thread_pointer - id - 1 < 4096;
#else
	return id == walk->thread_pointer;
#endif
}

/* Whether it is the one that runs: a thread can have one in each of several interpreters. */
static __always_inline bool is_attached(const struct walk *walk, const struct python_layout *at)
{
	if (at->thread_status != NOWHERE)
		return thread_half_word(walk, at->thread_status) & at->thread_active;
	return walk->running == walk->thread;
}

static __always_inline bool read_thread(struct walk *walk, const struct installed_layout *layout,
					struct task_struct *task)
{
	return !READ(walk->thread_block, below(layout->thread_bytes, 2 * THREAD_BLOCK), walk->thread);
}

static __always_inline void take(struct walk *walk, const struct python_layout *at)
{
	walk->found = walk->thread;
	walk->found_in = thread_word(walk, at->thread_interpreter);
	walk->frame = thread_word(walk, at->thread_frame);
}

/* Looks at one thread state or goes to the next interpreter; returns 1 at the end. */
static __always_inline int search_step(struct walk *walk, struct task_struct *task)
{
	struct installed_layout *layout = layout_of(walk);
	bool attached;

	if (!layout)
		return 1;
	if (!walk->thread) {
		u64 interpreter = walk->interpreter;

		if (!interpreter || walk->interpreters++ >= MAX_INTERPRETERS)
			return 1;
		if (READ(&walk->thread, sizeof(u64), interpreter + layout->at.interpreter_threads) ||
		    READ(&walk->interpreter, sizeof(u64), interpreter + layout->at.interpreter_next)) {
			walk->outcome = UNREADABLE;
			return 1;
		}
		return 0;
	}
	walk->looked++;
	if (!read_thread(walk, layout, task)) {
		walk->outcome = UNREADABLE;
		return 1;
	}
	if (is_own(walk, &layout->at)) {
		attached = is_attached(walk, &layout->at);
		/* Where none is attached, one with a frame is better than one without. */
		if (attached || !walk->found || (!walk->frame && thread_word(walk, layout->at.thread_frame)))
			take(walk, &layout->at);
		walk->thread = 0; /* at most one in each interpreter */
		return attached;
	}
	walk->thread = thread_word(walk, layout->at.thread_next);
	return 0;
}

/* Starts the search; returns 1 when the thread state of the last time is still the one that runs. */
static __always_inline int search_begin(struct walk *walk, struct task_struct *task, u32 host_tid)
{
	struct installed_layout *layout = layout_of(walk);
	struct known_thread *known;

	if (!layout)
		return 1;
	walk->found = 0;
	walk->frame = 0;
	walk->running = 0;
	walk->interpreters = 0;
	walk->looked = 0;
	if (layout->at.runtime_current != NOWHERE &&
	    READ(&walk->running, sizeof(u64), walk->runtime + layout->at.runtime_current)) {
		walk->outcome = UNREADABLE;
		return 1;
	}
	known = bpf_map_lookup_elem(&threads, &host_tid);
	if (known && known->space == walk->space) {
		walk->thread = known->state;
		if (read_thread(walk, layout, task) && is_own(walk, &layout->at) && is_attached(walk, &layout->at)) {
			take(walk, &layout->at);
			return 1;
		}
	}
	walk->thread = 0;
	if (READ(&walk->interpreter, sizeof(u64), walk->runtime + layout->at.runtime_interpreters)) {
		walk->outcome = UNREADABLE;
		return 1;
	}
	return 0;
}

/* After the search: its outcome, and the first frame. */
static __always_inline u32 search_end(struct walk *walk, struct task_struct *task, u32 host_tid)
{
	struct installed_layout *layout = layout_of(walk);
	struct known_thread known = {.space = walk->space, .state = walk->found};
	struct known_thread *before;
	u64 frame = walk->frame;

	if (!layout)
		return LOST;
	if (walk->outcome != RESOLVED)
		return walk->outcome;
	if (!walk->found) /* or there were more thread states than are looked at */
		return walk->thread ? OVER_BUDGET : NATIVE_THREAD;
	before = bpf_map_lookup_elem(&threads, &host_tid);
	if (!before || before->state != walk->found || before->space != walk->space)
		bpf_map_update_elem(&threads, &host_tid, &known, 0);
	if (frame && layout->at.thread_frame_via != NOWHERE &&
	    READ(&walk->frame, sizeof(u64), frame + layout->at.thread_frame_via))
		return UNREADABLE;
	return walk->frame ? RESOLVED : NO_FRAMES;
}

/*
 * Whether the thread that was found holds the GIL. `waits_at` is the address of the futex on which it
 * sleeps: those who wait for the GIL sleep on one inside its state.
 */
static __always_inline u32 gil_of(const struct walk *walk, struct task_struct *task, u64 waits_at)
{
	struct installed_layout *layout = layout_of(walk);
	u64 gil, holder = 0;
	u32 locked = 0;

	if (!layout || layout->at.free_threaded)
		return GIL_UNKNOWN;
	if (layout->at.interpreter_gil != NOWHERE) {
		if (READ(&gil, sizeof(gil), walk->found_in + layout->at.interpreter_gil))
			return GIL_UNKNOWN;
	} else if (layout->at.runtime_gil != NOWHERE) {
		gil = walk->runtime + layout->at.runtime_gil;
	} else {
		return GIL_UNKNOWN;
	}
	if (waits_at - gil < layout->at.gil_size)
		return GIL_WAITING;
	if (READ(&locked, sizeof(locked), gil + layout->at.gil_locked) ||
	    READ(&holder, sizeof(holder), gil + layout->at.gil_holder))
		return GIL_UNKNOWN;
	return locked == 1 && holder == walk->found ? GIL_HELD : GIL_RELEASED;
}

#endif
