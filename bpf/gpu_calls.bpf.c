// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Calls of CUDA and NCCL functions by one job, seen by probes at their first instructions while a window is
 * open. Counted here, exactly; told one by one through a ring buffer, as far as that has room.
 *
 * There are no return probes: those rewrite the caller's stack. The end of a call is seen by a plain probe
 * where it returns to, which user space puts there when it is told of the place.
 */
#define READ(destination, size, address) bpf_probe_read_user(destination, size, (const void *)(address))
#include "python_rows.h"

#define MAX_POINTS 4096
#define MAX_TOTALS 2048
#define MAX_ROWS 4096 /* threads of a job that call */
#define MAX_SITES 4096
#define GAP_BUCKETS 512
#define MAX_KERNEL_NAME 256

/* As in tracing/functions.py: a function calls those of its own layer or of a later one. */
enum layer {
	NCCL,
	RUNTIME_WRAPPER,
	RUNTIME,
	DRIVER,
};

enum shape {
	PLAIN,
	RUNTIME_LAUNCH,
	RUNTIME_LAUNCH_EX,
	DRIVER_LAUNCH,
	DRIVER_LAUNCH_EX,
};

enum category {
	LAUNCH,
	GRAPH,
	COPY,
	SET,
	ALLOC,
	FREE,
	SYNC,
	COLLECTIVE,
	LOAD,
};

#define TIMED 1	      /* its end is looked for */
#define CALIBRATION 2 /* not a function of anybody's: a hit costs what any hit costs, and is not told */
#define STEPPED 4     /* its first instruction is one that the kernel must step over, which costs more */
#define NO_ARGUMENT -1

/* A probed function in one file; a probe's cookie is its index. */
struct point {
	u32 total; /* row of call_totals; of functions with a kind_arg that of kind 0 */
	u8 layer;
	u8 category;
	u8 shape;
	u8 flags;
	s8 kind_arg;
	s8 bytes_arg;
	s8 times_arg;
	s8 type_arg;
	s8 stream_arg;
	s8 target_arg;
	s8 name_arg;
	u8 shift;
	/* How far the file's code reaches from here: a caller in between is in the same file. */
	u64 below;
	u64 above;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_POINTS);
	__type(key, u32);
	__type(value, struct point);
} points SEC(".maps");

/* Mapped by user space. */
struct window {
	u32 counting; /* else hits are counted as hits alone */
	u32 stacks;   /* launches are told with their Python stacks */
	u32 epoch;    /* grows whenever the probes are put in place anew */
	u32 rows;     /* of threads that were given out */
	u32 by_user;  /* only threads of user `uid`: others' are taken as other jobs' */
	u32 uid;
	u64 foreign_hits;
	u64 foreign_stepped; /* of them, of probes that are STEPPED */
	u64 events_lost;
	u64 unplaced; /* calls of threads for which there was no row */
	u64 sites_lost;
	u64 unpaired; /* timed calls after which another one began in the thread */
	u64 calibration_hits;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct window);
} the_windows SEC(".maps");

/* All calls of one function, of one kind where it has several. Mapped by user space. */
struct call_total {
	u64 calls;
	u64 bytes;
	u64 sized; /* calls whose bytes are known */
	u64 timed; /* calls whose end was seen */
	u64 time_ns;
	u64 nested; /* inside another call, which is counted instead */
	u64 unused[2];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_TOTALS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct call_total);
} call_totals SEC(".maps");

/* Time from one launch of a thread to its next, in buckets: eight to each power of two. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, GAP_BUCKETS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, u64);
} gaps SEC(".maps");

/* As it is told. The fields up to the stream lie as in the structures of launches with attributes. */
struct call {
	u32 grid[3];
	u32 block[3];
	u32 shared;
	u32 kind; /* of copies, plus 1 */
	u64 stream;
	u64 target; /* host stub or CUfunction of a launch; communicator, graph */
	u64 bytes;  /* plus 1; 0: not known */
};

/* The last call that was not inside another one: the thread may still be in it. */
struct outer {
	u64 sp;	 /* at its first instruction */
	u64 ret; /* where it returns to */
	u64 ip;
	u64 likeness; /* what a call that is the same, further in, has in common with it */
	u32 point;
	u32 unused;
};

/* The last timed call whose end has not been seen. */
struct pending {
	u64 sp;
	u64 ret;
	u64 begin_ns; /* 0: there is none */
	u64 written;  /* of loads: where the handle will stand */
	u64 name;
	u32 point;
	u32 total;
};

/* A thread that calls. It alone writes here; user space maps it. */
struct thread_row {
	u64 born;
	u64 hits;
	u64 program_ns;
	u64 calls;
	u64 launches;
	u64 stepped; /* hits of probes that are STEPPED */
	u64 last_launch_ns;
	u32 epoch; /* of that */
	u32 host_tid;
	u32 host_pid;
	u32 tid; /* in user space's namespace; 0: not visible there */
	u32 pid;
	u32 unused;
	struct outer outer[2]; /* of NCCL and of CUDA */
	struct pending pending;
	/* Of the hit that is looked at. The stack of a program, 512 bytes, has no room for them. */
	u64 arguments[8]; /* those in registers */
	u64 sp, ip, ret;
	struct call call;
};
_Static_assert(sizeof(struct thread_row) == 352, "user space reads rows of this size");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_ROWS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct thread_row);
} thread_rows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 2 * MAX_ROWS);
	__type(key, u32); /* thread id, the host's */
	__type(value, u32);
} rows_of_threads SEC(".maps");

/* Places to which timed calls return, that user space has been told of. */
struct site {
	u64 address;
	u64 host_pid;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_SITES);
	__type(key, struct site);
	__type(value, u32);
} sites SEC(".maps");

/*
 * Walks of Python stacks in progress. A probe's program can be interrupted by another thread that hits one as
 * well, so each CPU has two, taken for as long as a walk lasts.
 */
struct taken_walk {
	struct walk walk;
	u64 taken;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2 * MAX_CPUS);
	__type(key, u32);
	__type(value, struct taken_walk);
} call_walks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4 * 1024 * 1024);
} call_records SEC(".maps");

enum call_record_kind {
	CALL = 1,
	END = 2,
	SITE = 3,
	LOADED = 4,
};

struct call_record {
	u32 kind;
	u32 row;
	u64 time_ns;
	u32 point;
	u32 outcome; /* of the walk */
	u32 stack;   /* the row of the stack, when that is RESOLVED */
	u32 unused;
	struct call call;
};

struct end_record {
	u32 kind;
	u32 row;
	u64 begin_ns;
	u64 duration_ns;
};

struct site_record {
	u32 kind;
	u32 pid;
	u64 address;
};

struct loaded_record {
	u32 kind;
	u32 pid;
	u64 handle;
	char name[MAX_KERNEL_NAME];
};

/* ---- registers ---- */

#if defined(__TARGET_ARCH_arm64)
/* AAPCS64: eight arguments in registers, the rest on the stack. */
#define REGISTERS 8
#define ABOVE_RETURN 0

static __always_inline void keep_arguments(struct thread_row *row, struct pt_regs *registers)
{
	row->arguments[0] = registers->regs[0];
	row->arguments[1] = registers->regs[1];
	row->arguments[2] = registers->regs[2];
	row->arguments[3] = registers->regs[3];
	row->arguments[4] = registers->regs[4];
	row->arguments[5] = registers->regs[5];
	row->arguments[6] = registers->regs[6];
	row->arguments[7] = registers->regs[7];
	row->sp = registers->sp;
	row->ip = registers->pc;
	row->ret = registers->regs[30];
}

static __always_inline void keep_place(struct thread_row *row, struct pt_regs *registers)
{
	row->sp = registers->sp;
	row->ip = registers->pc;
}
#else
/* System V ABI: six in registers, the rest above the return address. */
#define REGISTERS 6
#define ABOVE_RETURN 8

static __always_inline void keep_arguments(struct thread_row *row, struct pt_regs *registers)
{
	row->arguments[0] = registers->di;
	row->arguments[1] = registers->si;
	row->arguments[2] = registers->dx;
	row->arguments[3] = registers->cx;
	row->arguments[4] = registers->r8;
	row->arguments[5] = registers->r9;
	row->sp = registers->sp;
	row->ip = registers->ip;
	row->ret = 0;
	READ(&row->ret, sizeof(row->ret), row->sp);
}

static __always_inline void keep_place(struct thread_row *row, struct pt_regs *registers)
{
	row->sp = registers->sp;
	row->ip = registers->ip;
}
#endif

static __always_inline u64 argument(const struct thread_row *row, s32 number)
{
	u64 value = 0;

	if (number < REGISTERS)
		return row->arguments[number & 7];
	READ(&value, sizeof(value), row->sp + ABOVE_RETURN + 8 * (number - REGISTERS));
	return value;
}

/* ---- what a call is ---- */

/* Sizes of ncclDataType_t: int8, uint8, int32, uint32, int64, uint64, half, float, double, bfloat16, two float8. */
static __always_inline u64 size_of_type(u64 type)
{
	return type < 12 ? 0x112842884411ULL >> (4 * type) & 15 : 0;
}

/*
 * struct CUlaunchConfig of cuda.h, or cudaLaunchConfig_t of driver_types.h, up to the stream: in both of them grid
 * and block, the shared memory in the next 4 bytes or 8, the stream.
 */
static __always_inline void read_config(struct call *call, u64 config)
{
	_Static_assert(__builtin_offsetof(struct call, stream) == 32, "as in CUlaunchConfig");
	if (READ(call, __builtin_offsetof(struct call, target), config))
		return;
	call->kind = 0;
	call->stream++;
}

static __always_inline void decode_launch(const struct thread_row *row, u32 shape, struct call *call)
{
	u64 word;

	switch (shape) {
	case RUNTIME_LAUNCH:
		/* A dim3 takes two registers: x and y, then z. */
		call->target = argument(row, 0);
		word = argument(row, 1);
		call->grid[0] = word;
		call->grid[1] = word >> 32;
		call->grid[2] = argument(row, 2);
		word = argument(row, 3);
		call->block[0] = word;
		call->block[1] = word >> 32;
		call->block[2] = argument(row, 4);
		call->shared = argument(row, 6);
		call->stream = argument(row, 7) + 1;
		break;
	case RUNTIME_LAUNCH_EX:
	case DRIVER_LAUNCH_EX:
		call->target = argument(row, 1);
		read_config(call, argument(row, 0));
		break;
	case DRIVER_LAUNCH:
		call->target = argument(row, 0);
		call->grid[0] = argument(row, 1);
		call->grid[1] = argument(row, 2);
		call->grid[2] = argument(row, 3);
		call->block[0] = argument(row, 4);
		call->block[1] = argument(row, 5);
		call->block[2] = argument(row, 6);
		call->shared = argument(row, 7);
		call->stream = argument(row, 8) + 1;
		break;
	}
}

static __always_inline void decode(const struct thread_row *row, const struct point *point, struct call *call)
{
	if (point->shape != PLAIN) {
		decode_launch(row, point->shape, call);
		return;
	}
	if (point->bytes_arg != NO_ARGUMENT) {
		u64 bytes = argument(row, point->bytes_arg);

		if (point->times_arg != NO_ARGUMENT)
			bytes *= argument(row, point->times_arg);
		if (point->type_arg != NO_ARGUMENT)
			bytes *= size_of_type(argument(row, point->type_arg) & 0xffffffff);
		call->bytes = (bytes << (point->shift & 7)) + 1;
	}
	if (point->kind_arg != NO_ARGUMENT)
		call->kind = (argument(row, point->kind_arg) & 0xffffffff) + 1;
	if (point->stream_arg != NO_ARGUMENT)
		call->stream = argument(row, point->stream_arg) + 1;
	if (point->target_arg != NO_ARGUMENT)
		call->target = argument(row, point->target_arg);
}

/* ---- calls inside calls ---- */

static __always_inline u64 likeness_of(const struct point *point, const struct call *call)
{
	u64 hash = mix(point->category, call->bytes, 0x9e3779b97f4a7c15);

	hash = mix(hash, call->stream, 0xc2b2ae3d27d4eb4f);
	hash = mix(hash, (u64)call->grid[0] << 32 | call->grid[1], 0x9e3779b97f4a7c15);
	hash = mix(hash, (u64)call->grid[2] << 32 | call->block[0], 0xc2b2ae3d27d4eb4f);
	return mix(hash, (u64)call->block[1] << 32 | call->block[2], 0x9e3779b97f4a7c15);
}

/* Whether the thread is still in its last call, as far as its stack shows. */
static __always_inline bool still_in(const struct outer *outer)
{
#if !defined(__TARGET_ARCH_arm64)
	u64 ret = 0;

	if (READ(&ret, sizeof(ret), outer->sp) || ret != outer->ret)
		return false;
#endif
	return true;
}

/*
 * Whether a call is made by the one before it. One that is made lies deeper on the stack, comes from the same
 * file, and the stack still holds where the outer one returns to. One that is jumped to, as the last thing that
 * the outer one does, has its very place on the stack, goes to a later layer, and is the same call.
 */
static __always_inline bool inside(const struct outer *outer, const struct point *point, u64 sp, u64 ret, u64 likeness)
{
	struct point *around;
	u32 key = outer->point;

	if (!outer->sp || sp > outer->sp)
		return false;
	around = bpf_map_lookup_elem(&points, &key);
	if (!around)
		return false;
	if (sp == outer->sp)
		return ret == outer->ret && point->layer > around->layer && likeness == outer->likeness;
	return point->layer >= around->layer && ret - (outer->ip - around->below) < around->below + around->above &&
	       still_in(outer);
}

/* ---- threads ---- */

static __always_inline struct window *the_window(void)
{
	u32 key = 0;

	return bpf_map_lookup_elem(&the_windows, &key);
}

/* The thread's row and its number; NULL when there is none left. */
static __always_inline struct thread_row *row_of_thread(struct task_struct *task, u32 host_pid, u32 host_tid,
							const struct python_control *shared, struct window *window,
							u32 *number)
{
	u32 *known = bpf_map_lookup_elem(&rows_of_threads, &host_tid);
	u64 born = task->start_boottime;
	struct thread_row *row;

	if (known) {
		*number = *known;
		row = bpf_map_lookup_elem(&thread_rows, number);
		if (row && row->born == born)
			return row;
	}
	if (window->rows >= MAX_ROWS)
		return NULL;
	*number = __sync_fetch_and_add(&window->rows, 1);
	row = bpf_map_lookup_elem(&thread_rows, number);
	if (!row)
		return NULL;
	row->born = born;
	row->host_tid = host_tid;
	row->host_pid = host_pid;
	row->tid = visible_id(BPF_CORE_READ(task, thread_pid), shared);
	row->pid = visible_id(BPF_CORE_READ(task, group_leader, thread_pid), shared);
	bpf_map_update_elem(&rows_of_threads, &host_tid, number, 0);
	return row;
}

/* ---- counting ---- */

static __always_inline struct call_total *total_of(u32 row)
{
	return bpf_map_lookup_elem(&call_totals, &row);
}

static __always_inline u32 log2_of(u64 value)
{
	u32 log = 0;

	if (value >> 32) {
		value >>= 32;
		log = 32;
	}
	if (value >> 16) {
		value >>= 16;
		log += 16;
	}
	if (value >> 8) {
		value >>= 8;
		log += 8;
	}
	if (value >> 4) {
		value >>= 4;
		log += 4;
	}
	if (value >> 2) {
		value >>= 2;
		log += 2;
	}
	return log + (value >> 1);
}

static __always_inline void count_gap(u64 ns)
{
	u32 log = log2_of(ns | 8), bucket;
	u64 *count;

	bucket = ns < 8 ? ns : (log - 2) * 8 + (ns >> (log - 3) & 7);
	count = bpf_map_lookup_elem(&gaps, &bucket);
	if (count)
		__sync_fetch_and_add(count, 1);
}

static __always_inline void count_launch(struct thread_row *row, const struct window *window, u64 now)
{
	row->launches++;
	if (row->last_launch_ns && row->epoch == window->epoch)
		count_gap(now - row->last_launch_ns);
	row->last_launch_ns = now;
	row->epoch = window->epoch;
}

/* ---- the Python stack of a launch ---- */

static __always_inline struct walk *walk_at(u32 number)
{
	struct taken_walk *taken = bpf_map_lookup_elem(&call_walks, &number);

	return taken ? &taken->walk : NULL;
}

/* Functions of their own, and not static, as in python_stacks.bpf.c. */
__noinline int call_next_thread(u32 number)
{
	struct walk *walk = walk_at(number);

	return walk ? search_step(walk, NULL) : 1;
}

__noinline int call_describe_code(u32 number)
{
	struct walk *walk = walk_at(number);
	struct python_slot *row;
	u32 slot, outcome;

	if (!walk)
		return LOST;
	slot = walk->slot;
	row = bpf_map_lookup_elem(&python_slots, &slot);
	if (!row)
		return LOST;
	if (!affordable(row, walk->now, &row->codes, MAX_NEW_CODES))
		return OVER_BUDGET;
	outcome = describe(walk, NULL, number & (2 * MAX_CPUS - 1));
	__sync_fetch_and_add(&row->codes, walk->described / 256);
	return outcome;
}

__noinline int call_next_frame(u32 number)
{
	struct walk *walk = walk_at(number);

	return walk ? FRAME_STEP(walk, NULL, call_describe_code(number)) : 1;
}

__noinline int call_find_thread(u32 number)
{
	u32 i;

	for (i = 0; i < MAX_THREADS; i++)
		if (call_next_thread(number))
			break;
	return 0;
}

__noinline int call_walk_frames(u32 number)
{
	u32 i;

	for (i = 0; i < MAX_STEPS; i++)
		if (call_next_frame(number))
			break;
	return 0;
}

/*
 * Not inlined, so that its stack is not on_call's, which has to be there beside those of the functions above: 512
 * bytes is all they may take together, and only from 6.13 on has each its own.
 */
static __noinline u32 begin_walk(struct walk *walk, struct task_struct *task, u32 slot, struct python_slot *row,
				 struct python_control *shared)
{
	return begin(walk, task, bpf_get_current_pid_tgid() >> 32, slot, row, shared);
}

/* Walks the stack of the current thread; its outcome, and the stack's row when that is RESOLVED. */
static __always_inline u32 walk_stack(struct task_struct *task, u32 host_tid, u32 slot, struct python_slot *row,
				      struct python_control *shared, u32 *stack)
{
	u32 number = 2 * (bpf_get_smp_processor_id() & (MAX_CPUS - 1)), outcome;
	struct taken_walk *taken = bpf_map_lookup_elem(&call_walks, &number);
	struct walk *walk;

	if (!taken)
		return LOST;
	if (__sync_lock_test_and_set(&taken->taken, 1)) {
		number++;
		taken = bpf_map_lookup_elem(&call_walks, &number);
		if (!taken || __sync_lock_test_and_set(&taken->taken, 1))
			return LOST;
	}
	walk = &taken->walk;
	outcome = begin_walk(walk, task, slot, row, shared);
	if (outcome == RESOLVED) {
		if (!search_begin(walk, NULL, host_tid))
			call_find_thread(number);
		outcome = search_end(walk, NULL, host_tid);
	}
	if (outcome == RESOLVED) {
		walk->stack.flags = gil_of(walk, NULL, 0);
		call_walk_frames(number);
		outcome = walk->outcome;
	}
	if (outcome == RESOLVED)
		outcome = count(walk, row, shared, 0, stack);
	__sync_fetch_and_add(&row->samples[outcome & (OUTCOMES - 1)], 1);
	taken->taken = 0;
	return outcome;
}

/* ---- the probes ---- */

static __always_inline void begin_timed(struct thread_row *row, const struct point *point, struct window *window,
					u32 key, u32 total, u64 now)
{
	struct site site = {.address = row->ret, .host_pid = row->host_pid};
	struct site_record record = {.kind = SITE, .pid = row->pid, .address = row->ret};
	struct pending *pending = &row->pending;
	u32 one = 1;

	if (pending->begin_ns)
		__sync_fetch_and_add(&window->unpaired, 1);
	pending->sp = row->sp;
	pending->ret = row->ret;
	pending->begin_ns = now;
	pending->point = key;
	pending->total = total;
	pending->written = row->call.target;
	pending->name = point->name_arg == NO_ARGUMENT ? 0 : argument(row, point->name_arg);
	if (bpf_map_lookup_elem(&sites, &site))
		return;
	if (bpf_map_update_elem(&sites, &site, &one, BPF_NOEXIST) ||
	    bpf_ringbuf_output(&call_records, &record, sizeof(record), BPF_RB_FORCE_WAKEUP))
		__sync_fetch_and_add(&window->sites_lost, 1);
}

static __always_inline u64 wake_up_for_calls(void)
{
	u64 full = bpf_ringbuf_query(&call_records, BPF_RB_AVAIL_DATA);
	u64 size = bpf_ringbuf_query(&call_records, BPF_RB_RING_SIZE);

	return full > size / 2 ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP;
}

static __always_inline void tell_of_load(struct thread_row *row, const struct pending *pending)
{
	struct loaded_record *record = bpf_ringbuf_reserve(&call_records, sizeof(*record), 0);

	if (!record)
		return;
	record->kind = LOADED;
	record->pid = row->pid;
	if (READ(&record->handle, sizeof(record->handle), pending->written) ||
	    bpf_probe_read_user_str(record->name, sizeof(record->name), (const void *)pending->name) < 0)
		bpf_ringbuf_discard(record, BPF_RB_NO_WAKEUP);
	else
		bpf_ringbuf_submit(record, BPF_RB_NO_WAKEUP);
}

static __always_inline void seen(u32 key, struct point *point, struct task_struct *task, u32 slot,
				 struct python_slot *python, struct python_control *shared, struct window *window,
				 struct thread_row *row, u32 number, u64 now)
{
	u64 sp = row->sp, ret = row->ret, likeness;
	struct outer *outer = &row->outer[point->layer == NCCL ? 0 : 1];
	struct call_record *record;
	struct call_total *total;
	struct call *call = &row->call;
	u32 total_row = point->total, outcome = OUTCOMES, stack = 0;

	__builtin_memset(call, 0, sizeof(*call));
	decode(row, point, call);
	if (point->layer == RUNTIME_WRAPPER)
		call->target = ret; /* its kernel is the runtime's own handle; what calls it bears the kernel's name */
	likeness = likeness_of(point, call);
	if (point->kind_arg != NO_ARGUMENT)
		total_row += call->kind <= 5 ? call->kind - 1 : 5;
	total = total_of(total_row);
	if (!total)
		return;
	if (inside(outer, point, sp, ret, likeness)) {
		if (sp == outer->sp) { /* the jump took its place */
			outer->point = key;
			outer->ip = row->ip;
		}
		if (window->counting)
			__sync_fetch_and_add(&total->nested, 1);
		return;
	}
	if (row->pending.begin_ns && row->pending.name) {
		/* A load whose end was not seen: it is over, and what it has written is still there. */
		tell_of_load(row, &row->pending);
		row->pending.begin_ns = 0;
	}
	outer->sp = sp;
	outer->ret = ret;
	outer->ip = row->ip;
	outer->likeness = likeness;
	outer->point = key;
	if (!window->counting)
		return;
	__sync_fetch_and_add(&total->calls, 1);
	if (call->bytes) {
		__sync_fetch_and_add(&total->bytes, call->bytes - 1);
		__sync_fetch_and_add(&total->sized, 1);
	}
	row->calls++;
	if (point->category == LAUNCH || point->category == GRAPH)
		count_launch(row, window, now);
	if (point->flags & TIMED)
		begin_timed(row, point, window, key, total_row, now);
	if (window->stacks && (point->category == LAUNCH || point->category == GRAPH))
		outcome = walk_stack(task, row->host_tid, slot, python, shared, &stack);
	record = bpf_ringbuf_reserve(&call_records, sizeof(*record), 0);
	if (!record) {
		__sync_fetch_and_add(&window->events_lost, 1);
		return;
	}
	record->kind = CALL;
	record->row = number;
	record->time_ns = now;
	record->point = key;
	record->outcome = outcome;
	record->stack = stack;
	record->unused = 0;
	__builtin_memcpy(&record->call, call, sizeof(*call));
	bpf_ringbuf_submit(record, wake_up_for_calls());
}

/* What every hit begins with: the job's thread, or NULL when it is somebody else's. */
static __always_inline struct thread_row *hit(struct task_struct *task, struct python_control *shared,
					      struct window *window, u32 *slot, struct python_slot **python,
					      u32 *number)
{
	u64 ids = bpf_get_current_pid_tgid();
	struct thread_row *row;

	*python = NULL;
	if (!window->by_user || (u32)bpf_get_current_uid_gid() == window->uid)
		*python = row_of(task, ids >> 32, cgroup_of(task), shared, slot);
	if (!*python) {
		__sync_fetch_and_add(&window->foreign_hits, 1);
		return NULL;
	}
	row = row_of_thread(task, ids >> 32, ids, shared, window, number);
	if (!row) {
		__sync_fetch_and_add(&window->unplaced, 1);
		return NULL;
	}
	row->hits++;
	return row;
}

/*
 * From Linux 6.13 on a program of this type has a stack that is the CPU's, on the ground that no two of them run on
 * one CPU at the same time. In uprobes they do: these are preempted, where the kernel can be, and the next task's
 * hit writes into the same stack. A program that has tail calls keeps to the stack of the task (verifier.c,
 * check_max_stack_depth). There is nothing in this table, and so nothing is called.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, u32);
} no_programs SEC(".maps");

static __always_inline int nothing_to_do(struct pt_regs *registers)
{
	bpf_tail_call(registers, &no_programs, 0);
	return 0;
}

SEC("uprobe")
int on_call(struct pt_regs *registers)
{
	u32 key = bpf_get_attach_cookie(registers), slot = SLOT_SYSTEM, number = 0;
	struct point *point = bpf_map_lookup_elem(&points, &key);
	struct python_control *shared = the_control();
	struct window *window = the_window();
	u64 now = bpf_ktime_get_ns();
	struct python_slot *python;
	struct task_struct *task;
	struct thread_row *row;

	if (!point || !shared || !window)
		return nothing_to_do(registers);
	if (point->flags & CALIBRATION) {
		__sync_fetch_and_add(&window->calibration_hits, 1);
		return 0;
	}
	task = bpf_get_current_task_btf();
	row = hit(task, shared, window, &slot, &python, &number);
	if (!row) {
		if (point->flags & STEPPED)
			__sync_fetch_and_add(&window->foreign_stepped, 1);
		return 0;
	}
	if (point->flags & STEPPED)
		row->stepped++;
	keep_arguments(row, registers);
	seen(key, point, task, slot, python, shared, window, row, number, now);
	row->program_ns += bpf_ktime_get_ns() - now;
	return 0;
}

/* Where timed calls return to. Others return there as well. */
SEC("uprobe")
int on_return(struct pt_regs *registers)
{
	struct python_control *shared = the_control();
	struct window *window = the_window();
	u64 now = bpf_ktime_get_ns();
	u32 slot = SLOT_SYSTEM, number = 0;
	struct end_record record = {.kind = END};
	struct python_slot *python;
	struct pending pending;
	struct thread_row *row;
	struct call_total *total;
	struct point *point;

	if (!shared || !window)
		return nothing_to_do(registers);
	row = hit(bpf_get_current_task_btf(), shared, window, &slot, &python, &number);
	if (!row)
		return 0;
	if (bpf_get_attach_cookie(registers) & STEPPED)
		row->stepped++;
	keep_place(row, registers);
	pending = row->pending;
	if (!pending.begin_ns || pending.ret != row->ip || pending.sp + ABOVE_RETURN != row->sp)
		goto out;
	row->pending.begin_ns = 0;
	row->outer[0].sp = row->outer[0].sp > pending.sp ? row->outer[0].sp : 0;
	row->outer[1].sp = row->outer[1].sp > pending.sp ? row->outer[1].sp : 0;
	total = total_of(pending.total);
	point = bpf_map_lookup_elem(&points, &pending.point);
	if (!total || !point)
		goto out;
	__sync_fetch_and_add(&total->timed, 1);
	__sync_fetch_and_add(&total->time_ns, now - pending.begin_ns);
	if (point->category == LOAD) {
		tell_of_load(row, &pending);
		goto out;
	}
	record.row = number;
	record.begin_ns = pending.begin_ns;
	record.duration_ns = now - pending.begin_ns;
	bpf_ringbuf_output(&call_records, &record, sizeof(record), wake_up_for_calls());
out:
	row->program_ns += bpf_ktime_get_ns() - now;
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
