/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the programs that read Python stacks share with user space and with each other: jobs and processes
 * to look at, layouts, code objects and stacks that are known, counts, and records of what is new.
 */
#ifndef EXPANSE_PYTHON_MAPS_H
#define EXPANSE_PYTHON_MAPS_H

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
#define MAX_LAYOUTS 1024

/* What one job may have looked up and described in a second; more is counted as over budget. */
#define MAX_ASKS 128
#define MAX_NEW_CODES 2048 /* each counts once, and once more for every 256 bytes of it */
#define MAX_NEW_STACKS 8192
#define MAX_READS 100000     /* of waiting threads' memory, each some 0.4 us */
#define MAX_READS_ALL 200000 /* for all jobs together */

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
	u32 second;	       /* to which the four below belong */
	u32 asks;
	u32 codes;
	u32 stacks;
	u32 reads; /* of waiting threads' memory */
	u32 unused[58];
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
	u64 namespace; /* that namespace */
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
	u32 code_version; /* a number that no two code objects of an interpreter have; before 3.12 NOWHERE */
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
	u32 described; /* bytes that were sent of a new code object */
	u32 looked;    /* thread states that were looked at */
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

/* The budget of a row is that of one second. */
static __always_inline void renew_budget(struct python_slot *row, u64 now)
{
	u32 second = now >> 30;

	if (row->second == second)
		return;
	row->second = second;
	row->asks = 0;
	row->codes = 0;
	row->stacks = 0;
	row->reads = 0;
}

static __always_inline bool affordable(struct python_slot *row, u64 now, u32 *count, u32 limit)
{
	renew_budget(row, now);
	/* No value from an atomic operation before 5.12. One more or less does not matter here. */
	__sync_fetch_and_add(count, 1);
	return *count <= limit;
}

/* Readers wake up for questions and when the ring is half full: else they come by once a tick. */
static __always_inline u64 wake_up(void)
{
	u64 full = bpf_ringbuf_query(&python_records, BPF_RB_AVAIL_DATA);
	u64 size = bpf_ringbuf_query(&python_records, BPF_RB_RING_SIZE);

	return full > size / 2 ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP;
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

#endif
