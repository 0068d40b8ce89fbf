/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Reading the Python stack of one thread: its thread state, its frames, the names of code that was not
 * seen before; and counting whole stacks. Shared by the sampler of running threads and the reader of
 * waiting ones, which differ in how memory is read: each defines READ(destination, size, address) before
 * it includes this, and may use a `task` that is in scope.
 *
 * Everything read here is another program's memory. It can change while it is read and can be made to
 * mislead, so every loop is bounded and every result can be "not known", with a reason that is counted.
 */
#ifndef EXPANSE_PYTHON_WALK_H
#define EXPANSE_PYTHON_WALK_H

#include "job_slots.h"
#include "python_layout.h"

#define MAX_FRAMES 128	 /* of a stack, innermost first; what lies further out is cut */
#define MAX_STEPS 320	 /* frames looked at, those that are no Python function's included */
#define MAX_THREADS 1024 /* thread states looked at to find one */
#define MAX_INTERPRETERS 16
#define MAX_TEXT 1020	     /* bytes of a string: a multiple of every character size */
#define MAX_LINES_CHUNK 4088 /* bytes of a line table in one record */
#define MAX_LINES_CHUNKS 17
#define MAX_STACKS 16384 /* rows of the table of counts */
#define MAX_LAYOUTS 64

/* What one job may have looked up and described in a second; more is counted as over budget. */
#define MAX_ASKS 128
#define MAX_NEW_CODES 4096
#define MAX_NEW_STACKS 8192

/* What became of a sample. The order is that of kernel/python_stacks.py. */
enum outcome {
	RESOLVED,
	STARTING, /* which interpreter the process runs is not known yet */
	NOT_PYTHON,
	UNSUPPORTED,
	OPTED_OUT,
	NATIVE_THREAD, /* a thread of a Python process that has no thread state */
	NO_FRAMES,     /* a thread state, but no Python function is running */
	UNREADABLE,
	CHANGED, /* what was read does not fit together */
	OVER_BUDGET,
	LOST, /* no room in the table of stacks or in the ring */
	OUTCOMES = 16,
};

enum gil {
	GIL_UNKNOWN,
	GIL_HELD,
	GIL_WAITING,
	GIL_RELEASED,
};

/* One job's row, mapped by user space. */
struct python_slot {
	u64 samples[OUTCOMES]; /* on a CPU */
	u64 visits[OUTCOMES];  /* waiting */
	u32 selected;	       /* written by user space: 0 as control.all says, 1 yes, 2 no */
	u32 second;	       /* to which the three below belong */
	u32 asks;
	u32 codes;
	u32 stacks;
	u32 unused[59];
};
_Static_assert(sizeof(struct python_slot) == 512, "user space reads rows of this size");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_SLOTS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct python_slot);
} python_slots SEC(".maps");

/* Mapped by user space, which writes all but the last four. */
struct python_control {
	u64 visit_ns; /* what a visit stands for */
	u64 seed_a, seed_b;
	u32 period_ns;	   /* what a sample stands for */
	u32 all;	   /* jobs are selected unless they are excepted */
	u32 by_process;	   /* only `wanted` processes and what they fork, whatever their job */
	u32 stack_epoch;   /* stacks of an earlier one get new rows */
	u32 code_epoch;	   /* code objects of an earlier one are described anew */
	u32 visit_rows_up; /* how many rows have ever been laid into `visit_rows`, and how many taken */
	u32 visit_rows_taken;
	u32 level; /* of user space's process id namespace; 0: the host's own */
	u32 unused;
	u64 namespace;	   /* that namespace */
	u64 unaccountable; /* samples for which there was no row to count them in */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct python_control);
} control SEC(".maps");

/* A layout, and how much has to be read to have all of it. */
struct installed_layout {
	struct python_layout at;
	u32 thread_bytes;
	u32 frame_bytes;
	u32 code_from;
	u32 code_bytes;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_LAYOUTS);
	__type(key, u32);
	__type(value, struct installed_layout);
} layouts SEC(".maps");

/*
 * An address space begins with an execution and is shared by what is forked from it: the same
 * interpreter at the same address.
 */
struct process {
	u64 space;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u32); /* thread group id, the host's */
	__type(value, struct process);
} processes SEC(".maps");

/* Processes to be taken up by their id in user space's namespace, with control.by_process. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, u32);
	__type(value, u32);
} wanted SEC(".maps");

struct space {
	u64 runtime; /* address of _PyRuntime */
	u32 state;   /* RESOLVED: can be walked; else the outcome of every sample */
	u32 layout;
	u64 again_ns; /* when user space is asked the next time */
	u32 tries;
	u32 unused;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, u64);
	__type(value, struct space);
} spaces SEC(".maps");

/* Thread states that were found, to be checked before they are used. */
struct known_thread {
	u64 space;
	u64 state;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, u32); /* thread id, the host's */
	__type(value, struct known_thread);
} threads SEC(".maps");

/* `content` tells code objects apart that come to lie at the same address one after another. */
struct code_key {
	u64 space;
	u64 address;
	u64 content;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 32768);
	__type(key, struct code_key);
	__type(value, u64);
} codes SEC(".maps");

/* Two hashes with seeds of this load: nobody can make two stacks alike. */
struct stack_key {
	u64 a, b;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_STACKS);
	__type(key, struct stack_key);
	__type(value, u32);
} stacks SEC(".maps");

/* Mapped by user space, which clears rows before it lays them ready for another stack. */
struct stack_count {
	u64 samples;
	u64 ns;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_STACKS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct stack_count);
} counts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 2 * 1024 * 1024);
} python_records SEC(".maps");

enum record_kind {
	ASK = 1,  /* which interpreter does this process run? */
	NAME = 2, /* parts of a code object, before its CODE record */
	FILE = 3,
	LINES = 4,
	CODE = 5,  /* all of it has been sent */
	STACK = 6, /* before it is counted for the first time */
};

struct ask_record {
	u32 kind;
	u32 slot;
	u64 space;
	u32 host_pid;
	u32 pid; /* in user space's namespace; 0: not visible there */
	u32 tid;
	u32 tries;
};

/* A part of a code object, followed by its bytes. */
struct part_record {
	u32 kind;
	u32 length; /* characters of a string; bytes of a line table */
	u64 code;
	u32 state; /* of a string; offset in a line table */
	u32 unused;
};

struct code_record {
	u32 kind;
	u32 layout;
	u64 code;
	u64 lines; /* address of the line table's bytes */
	u32 lines_length;
	u32 first_line;
	u32 pid;
	u32 unused;
};

struct stack_record {
	u32 kind;
	u32 slot;
	u32 row;
	u32 pid;
	u32 layout;
	u32 flags; /* gil, and below */
	u32 depth;
	u32 unused;
	u64 frames[MAX_FRAMES]; /* code << OFFSET_BITS | offset of the instruction, innermost first */
};
#define OFFSET_BITS 24
#define FLAG_WAITING 4
#define FLAG_TRUNCATED 8
#define STACK_HEADER __builtin_offsetof(struct stack_record, frames)

#define THREAD_BLOCK 256
#define BLOCK 128

/* One walk. */
struct walk {
	struct stack_record stack;
	struct code_key code;
	u64 space;
	u64 runtime;
	u64 thread_pointer;
	u64 running;	 /* before 3.12: the thread state that holds the GIL, or none */
	u64 interpreter; /* to be looked through next */
	u64 thread;	 /* to be looked at next, then the one that was found */
	u64 found;	 /* belongs to the thread; attached, if any is */
	u64 found_in;	 /* its interpreter */
	u64 frame;	 /* to be looked at next */
	u64 hash_a, hash_b;
	u64 name, file, lines;
	u64 code_id;
	u64 codes_made; /* by this walker, which lasts: the ids of code objects are its number and this */
	u64 now;
	u32 interpreters;
	u32 tid; /* as the process itself knows the thread */
	u32 outcome;
	u32 first_line;
	u32 slot;
	u32 table_kib; /* of the line table that was sent */
	u8 thread_block[THREAD_BLOCK];
	u8 frame_block[BLOCK];
	u8 code_block[BLOCK];
	struct part_record part;
	u8 bytes[4096];
};

static __always_inline struct python_control *the_control(void)
{
	u32 key = 0;

	return bpf_map_lookup_elem(&control, &key);
}

static __always_inline struct installed_layout *layout_of(const struct walk *walk)
{
	u32 key = walk->stack.layout;

	return bpf_map_lookup_elem(&layouts, &key);
}

static __always_inline bool affordable(struct python_slot *row, u64 now, u32 *count, u32 limit)
{
	u32 second = now >> 30;

	if (row->second != second) {
		row->second = second;
		row->asks = 0;
		row->codes = 0;
		row->stacks = 0;
	}
	/* No value from an atomic operation before 5.12. One more or less does not matter here. */
	__sync_fetch_and_add(count, 1);
	return *count <= limit;
}

/* Readers wake up for questions and when the ring is half full: else they come by once a tick. */
static __always_inline u64 wake_up(void)
{
	u64 full = bpf_ringbuf_query(&python_records, BPF_RB_AVAIL_DATA);

	return full > 1024 * 1024 ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP;
}

/*
 * `size` as it is, below a power of two that the verifier can see at the very place where it is used:
 * what was compared before, older ones forget when the value has been in memory meanwhile.
 */
static __always_inline u32 below(u32 size, u32 power)
{
	asm volatile("" : "+r"(size));
	return size & (power - 1);
}

static __always_inline u64 word(const u8 *block, u32 at)
{
	return *(const u64 *)(block + (at & (BLOCK - 8)));
}

static __always_inline u32 half_word(const u8 *block, u32 at)
{
	return *(const u32 *)(block + (at & (BLOCK - 4)));
}

static __always_inline u64 thread_word(const struct walk *walk, u32 at)
{
	return *(const u64 *)(walk->thread_block + (at & (THREAD_BLOCK - 8)));
}

static __always_inline u32 thread_half_word(const struct walk *walk, u32 at)
{
	return *(const u32 *)(walk->thread_block + (at & (THREAD_BLOCK - 4)));
}

static __always_inline u64 mix(u64 hash, u64 value, u64 factor)
{
	hash = (hash ^ value) * factor;
	return hash ^ (hash >> 29);
}

static __always_inline void hash_in(struct walk *walk, u64 value)
{
	walk->hash_a = mix(walk->hash_a, value, 0x9e3779b97f4a7c15);
	walk->hash_b = mix(walk->hash_b, value, 0xc2b2ae3d27d4eb4f);
}

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
	u32 tries = space->tries < 7 ? space->tries : 7;

	if (!affordable(row, now, &row->asks, MAX_ASKS))
		return;
	record.host_pid = BPF_CORE_READ(task, tgid);
	record.pid = visible_id(BPF_CORE_READ(task, group_leader, thread_pid), shared);
	record.tid = visible_id(BPF_CORE_READ(task, thread_pid), shared);
	space->tries++;
	/* Libraries are mapped after the execution, by the process itself: 5 ms, 20 ms, ... 82 s. */
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
	if (!walk->found)
		return NATIVE_THREAD;
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

/* ---- code objects that are new ---- */

static __always_inline bool send_part(struct walk *walk, u32 size)
{
	walk->part.code = walk->code_id;
	size = below(size, sizeof(walk->bytes)) + sizeof(walk->part);
	return !bpf_ringbuf_output(&python_records, &walk->part, size, wake_up());
}

static __always_inline u32 send_text(struct walk *walk, struct task_struct *task, u32 kind, u64 text)
{
	struct installed_layout *layout = layout_of(walk);
	struct {
		u64 length;
		u64 hash;
		u32 state;
		u32 unused;
	} head;
	u32 width, size;

	if (!layout)
		return LOST;
	if (READ(&head, sizeof(head), text + layout->at.text_length))
		return UNREADABLE;
	width = head.state >> (layout->at.text_kind_shift & 31) & 7;
	if (width != 1 && width != 2 && width != 4)
		return CHANGED;
	if (head.length > MAX_TEXT / width)
		size = MAX_TEXT;
	else
		size = head.length * width;
	text += head.state & layout->at.text_ascii ? layout->at.text_compact : layout->at.text_wide;
	if (READ(walk->bytes, below(size, sizeof(walk->bytes)), text))
		return UNREADABLE;
	walk->part.kind = kind;
	walk->part.length = head.length > 0x7fffffff ? 0x7fffffff : head.length;
	walk->part.state = head.state;
	return send_part(walk, size) ? RESOLVED : LOST;
}

/*
 * Sends everything about the code object, so that it stays known when the process is gone. What a line
 * table has past the chunks that are sent here, user space reads itself if the process still lives.
 */
static __always_inline u32 describe(struct walk *walk, struct task_struct *task, u32 walker)
{
	struct installed_layout *layout = layout_of(walk);
	struct code_record record = {.kind = CODE};
	u64 length = 0, table;
	u32 outcome, size, i;

	if (!layout)
		return LOST;
	walk->code_id = ++walk->codes_made << 11 | walker;
	outcome = send_text(walk, task, NAME, walk->name);
	if (outcome != RESOLVED)
		return outcome;
	outcome = send_text(walk, task, FILE, walk->file);
	if (outcome != RESOLVED)
		return outcome;
	if (READ(&length, sizeof(length), walk->lines + layout->at.bytes_length))
		return UNREADABLE;
	if (length > 0x7fffffff)
		return CHANGED;
	table = walk->lines + layout->at.bytes_data;
	for (i = 0; i < MAX_LINES_CHUNKS; i++) {
		u64 at = i * MAX_LINES_CHUNK;

		if (at >= length)
			break;
		size = length - at < MAX_LINES_CHUNK ? length - at : MAX_LINES_CHUNK;
		if (READ(walk->bytes, below(size, sizeof(walk->bytes)), table + at))
			return UNREADABLE;
		walk->part.kind = LINES;
		walk->part.length = size;
		walk->part.state = at;
		if (!send_part(walk, size))
			return LOST;
	}
	walk->table_kib = length >> 10;
	record.code = walk->code_id;
	record.layout = walk->stack.layout;
	record.first_line = walk->first_line;
	record.lines = table;
	record.lines_length = length;
	record.pid = walk->stack.pid;
	if (bpf_ringbuf_output(&python_records, &record, sizeof(record), wake_up()))
		return LOST;
	if (bpf_map_update_elem(&codes, &walk->code, &walk->code_id, BPF_NOEXIST)) {
		/* Another CPU was faster, or there is no room: the number is good all the same. */
		u64 *faster = bpf_map_lookup_elem(&codes, &walk->code);

		if (faster)
			walk->code_id = *faster;
	}
	return RESOLVED;
}

/* ---- frames ---- */

/* Reads what tells the code object at walk->code.address apart; RESOLVED when code_id is set. */
static __always_inline u32 recognise(struct walk *walk, struct task_struct *task)
{
	struct installed_layout *layout = layout_of(walk);
	struct python_control *shared = the_control();
	u64 content, hash = 0, *known;
	u32 from;

	if (!layout || !shared)
		return LOST;
	from = layout->code_from;
	if (READ(walk->code_block, below(layout->code_bytes, 2 * BLOCK), walk->code.address + from))
		return UNREADABLE;
	walk->first_line = half_word(walk->code_block, layout->at.code_first_line - from);
	walk->name = word(walk->code_block, layout->at.code_name - from);
	walk->file = word(walk->code_block, layout->at.code_file - from);
	walk->lines = word(walk->code_block, layout->at.code_lines - from);
	/* The name's hash, which the interpreter keeps beside it: everything else may be reused as it was. */
	if (READ(&hash, sizeof(hash), walk->name + layout->at.text_length + sizeof(u64)))
		return UNREADABLE;
	content = mix(walk->name, walk->file, 0x9e3779b97f4a7c15);
	content = mix(content, walk->lines, 0xc2b2ae3d27d4eb4f);
	content = mix(content, walk->first_line, 0x9e3779b97f4a7c15);
	content = mix(content, hash, 0xc2b2ae3d27d4eb4f);
	walk->code.content = mix(content, shared->code_epoch, 0x9e3779b97f4a7c15);
	walk->code.space = walk->space;
	walk->code_id = 0;
	known = bpf_map_lookup_elem(&codes, &walk->code);
	if (known)
		walk->code_id = *known;
	return RESOLVED;
}

/* Looks at one frame; returns 1 at the end of the walk. DESCRIBE is how describe() is called. */
#define FRAME_STEP(walk, task, DESCRIBE)                                                                               \
	({                                                                                                             \
		int ended = read_frame(walk, task);                                                                    \
		if (!ended && walk->code.address) {                                                                    \
			walk->outcome = recognise(walk, task);                                                         \
			if (walk->outcome == RESOLVED && !walk->code_id)                                               \
				walk->outcome = DESCRIBE;                                                              \
			if (walk->outcome == RESOLVED)                                                                 \
				add_frame(walk);                                                                       \
			else                                                                                           \
				ended = 1;                                                                             \
		}                                                                                                      \
		ended;                                                                                                 \
	})

/* Sets walk->code.address (0: no Python function's frame) and goes on to the frame that called it. */
static __always_inline int read_frame(struct walk *walk, struct task_struct *task)
{
	struct installed_layout *layout = layout_of(walk);
	u64 code, instruction, bytecode = 0;
	u32 owner, index = 0;
	s64 offset;

	if (!layout || !walk->frame || walk->stack.depth >= MAX_FRAMES)
		return 1;
	if (READ(walk->frame_block, below(layout->frame_bytes, 2 * BLOCK), walk->frame)) {
		walk->outcome = UNREADABLE;
		return 1;
	}
	walk->code.address = 0;
	walk->frame = word(walk->frame_block, layout->at.frame_previous);
	if (layout->at.frame_owner != NOWHERE) {
		owner = walk->frame_block[layout->at.frame_owner & (BLOCK - 1)];
		if (owner >= layout->at.frame_shim)
			return 0;
	}
	/* Objects are aligned: low bits are tags. */
	code = word(walk->frame_block, layout->at.frame_code) & ~7ULL;
	if (layout->at.code_instructions == NOWHERE) {
		offset = (s32)half_word(walk->frame_block, layout->at.frame_instruction);
		offset = offset < 0 ? 0 : offset * layout->at.instruction_unit;
	} else {
		instruction = word(walk->frame_block, layout->at.frame_instruction);
		bytecode = code + layout->at.code_instructions;
		if (layout->at.frame_bytecode != NOWHERE) {
			/* Threads run copies; the first of them is the code object's own. */
			index = half_word(walk->frame_block, layout->at.frame_bytecode);
			if (index && (READ(&bytecode, sizeof(u64), code + layout->at.code_bytecodes) ||
				      READ(&bytecode, sizeof(u64), bytecode + 8 + 8ULL * index))) {
				walk->outcome = UNREADABLE;
				return 1;
			}
		}
		offset = instruction - bytecode;
		if (offset < 0)
			return 0; /* being made: it has run nothing yet */
	}
	if (!code || offset >> OFFSET_BITS) {
		walk->outcome = CHANGED;
		return 1;
	}
	walk->code.address = code;
	walk->stack.frames[walk->stack.depth & (MAX_FRAMES - 1)] = offset;
	return 0;
}

static __always_inline void add_frame(struct walk *walk)
{
	u32 depth = walk->stack.depth & (MAX_FRAMES - 1);
	u64 frame = walk->code_id << OFFSET_BITS | walk->stack.frames[depth];

	walk->stack.frames[depth] = frame;
	hash_in(walk, frame);
	walk->stack.depth++;
}

/* ---- whole stacks ---- */

/* A free row for a stack that is new, and back when it could not be described: each program has its own way. */
static __always_inline bool take_row(u32 *row, struct python_control *shared);
static __always_inline void give_back_row(u32 *row, struct python_control *shared);

/* Adds to the row of a stack. */
static __always_inline u32 add_to(u32 row, u64 ns)
{
	struct stack_count *total = bpf_map_lookup_elem(&counts, &row);

	if (!total)
		return LOST;
	__sync_fetch_and_add(&total->samples, 1);
	__sync_fetch_and_add(&total->ns, ns);
	return RESOLVED;
}

/* Counts the stack that was walked, in the row that it sets; what became of it. */
static __always_inline u32 count(struct walk *walk, struct python_slot *slot, struct python_control *shared, u64 ns,
				 u32 *row)
{
	struct stack_key key;
	u32 *known, size;

	if (!walk->stack.depth)
		return NO_FRAMES;
	if (walk->frame)
		walk->stack.flags |= FLAG_TRUNCATED;
	hash_in(walk, walk->stack.flags | (u64)walk->stack.depth << 32);
	hash_in(walk, shared->stack_epoch);
	key.a = walk->hash_a;
	key.b = walk->hash_b;
	known = bpf_map_lookup_elem(&stacks, &key);
	if (known) {
		*row = *known;
		return add_to(*row, ns);
	}
	if (!affordable(slot, walk->now, &slot->stacks, MAX_NEW_STACKS))
		return OVER_BUDGET;
	if (!take_row(row, shared))
		return LOST;
	walk->stack.row = *row;
	size = STACK_HEADER + below(walk->stack.depth * sizeof(u64), 2 * sizeof(walk->stack.frames));
	if (bpf_ringbuf_output(&python_records, &walk->stack, size, wake_up())) {
		give_back_row(row, shared);
		return LOST;
	}
	/* What is in the table has been sent. Two CPUs may send the same stack: both rows are good. */
	bpf_map_update_elem(&stacks, &key, row, 0);
	return add_to(*row, ns);
}

#endif
