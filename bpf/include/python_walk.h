/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Reading the Python stack of one thread: its frames, and the names of code that was not seen before; and
 * counting whole stacks. Shared by the sampler of running threads and the reader of waiting ones.
 *
 * Everything read here is another program's memory. It can change while it is read and can be made to
 * mislead, so every loop is bounded and every result can be "not known", with a reason that is counted.
 */
#ifndef EXPANSE_PYTHON_WALK_H
#define EXPANSE_PYTHON_WALK_H

#include "python_threads.h"

/* ---- code objects that are new ---- */

/* What every str object has, from text_length on, in all versions and builds. */
struct text_head {
	u64 length; /* characters */
	u64 hash;   /* -1: not made yet */
	u32 state;
	u32 unused;
};

/* Bytes of each character: 1, 2 or 4 when all is well. */
static __always_inline u32 width_of(const struct text_head *head, const struct python_layout *at)
{
	return head->state >> (at->text_kind_shift & 31) & 7;
}

/* Where the characters are. */
static __always_inline u64 characters_of(u64 text, const struct text_head *head, const struct python_layout *at)
{
	return text + (head->state & at->text_ascii ? at->text_compact : at->text_wide);
}

static __always_inline bool send_part(struct walk *walk, u32 size)
{
	walk->part.code = walk->code_id;
	walk->described += size;
	size = below(size, sizeof(walk->bytes)) + sizeof(walk->part);
	return !bpf_ringbuf_output(&python_records, &walk->part, size, wake_up());
}

static __always_inline u32 send_text(struct walk *walk, struct task_struct *task, u32 kind, u64 text)
{
	struct installed_layout *layout = layout_of(walk);
	struct text_head head;
	u32 width, size;

	if (!layout)
		return LOST;
	if (READ(&head, sizeof(head), text + layout->at.text_length))
		return UNREADABLE;
	width = width_of(&head, &layout->at);
	if (width != 1 && width != 2 && width != 4)
		return CHANGED;
	if (head.length > MAX_TEXT / width)
		size = MAX_TEXT;
	else
		size = head.length * width;
	text = characters_of(text, &head, &layout->at);
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
	walk->described = 0;
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

#define TELLING 48 /* bytes of a string or table that tell it apart, besides its length */

/* The first TELLING of `size` bytes at `address`. */
static __always_inline u64 mix_bytes(struct walk *walk, u64 content, u64 address, u64 size, struct task_struct *task)
{
	u64 *words = (u64 *)walk->bytes;
	u32 i;

	__builtin_memset(words, 0, TELLING);
	READ(words, below(size > TELLING ? TELLING : size, 64), address);
	for (i = 0; i < TELLING / 8; i++)
		content = mix(content, words[i], 0x9e3779b97f4a7c15);
	return content;
}

/* What a string is like: by its hash where the interpreter has made it, else by its end. */
static __always_inline u64 mix_text(struct walk *walk, u64 content, u64 text, const struct python_layout *at,
				    struct task_struct *task)
{
	struct text_head head;
	u64 size;

	if (READ(&head, sizeof(head), text + at->text_length))
		return content;
	content = mix(mix(content, head.length, 0x9e3779b97f4a7c15), head.hash, 0xc2b2ae3d27d4eb4f);
	if (head.hash != -1ULL)
		return content;
	text = characters_of(text, &head, at);
	size = head.length * width_of(&head, at);
	if (size > TELLING)
		text += size - TELLING;
	return mix_bytes(walk, content, text, size, task);
}

/*
 * What tells a code object apart from others that lay at the same address before it, with all that they
 * pointed to: memory that is given back is given out again as it was.
 */
static __always_inline u64 content_of(struct walk *walk, const struct installed_layout *layout,
				      struct task_struct *task)
{
	u64 content, length = 0;
	u32 version = 0;

	content = mix(walk->name, walk->file, 0x9e3779b97f4a7c15);
	content = mix(content, walk->lines, 0xc2b2ae3d27d4eb4f);
	content = mix(content, walk->first_line, 0x9e3779b97f4a7c15);
	if (layout->code_version != NOWHERE)
		version = half_word(walk->code_block, layout->code_version - layout->code_from);
	if (version) /* else the interpreter has run out of them */
		return mix(content, version, 0xc2b2ae3d27d4eb4f);
	content = mix_text(walk, content, walk->name, &layout->at, task);
	content = mix_text(walk, content, walk->file, &layout->at, task);
	READ(&length, sizeof(length), walk->lines + layout->at.bytes_length);
	content = mix(content, length, 0x9e3779b97f4a7c15);
	return mix_bytes(walk, content, walk->lines + layout->at.bytes_data, length, task);
}

/* Looks at the code object at walk->code.address; sets code_id when it is known. */
static __always_inline u32 recognise(struct walk *walk, struct task_struct *task)
{
	struct installed_layout *layout = layout_of(walk);
	struct python_control *shared = the_control();
	u64 *known;
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
	walk->code.content = mix(content_of(walk, layout, task), shared->code_epoch, 0x9e3779b97f4a7c15);
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
	u64 code, previous, instruction, bytecode = 0;
	u32 owner, index = 0;
	s64 offset;

	if (!layout || !walk->frame)
		return 1;
	if (READ(walk->frame_block, below(layout->frame_bytes, 2 * BLOCK), walk->frame)) {
		walk->outcome = UNREADABLE;
		return 1;
	}
	walk->code.address = 0;
	previous = word(walk->frame_block, layout->at.frame_previous);
	if (layout->at.frame_owner != NOWHERE) {
		owner = walk->frame_block[layout->at.frame_owner & (BLOCK - 1)];
		if (owner >= layout->at.frame_shim) {
			walk->frame = previous;
			return 0;
		}
	}
	/* After the shims: what lies beyond is cut only if a function is there. */
	if (walk->stack.depth >= MAX_FRAMES)
		return 1;
	walk->frame = previous;
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
