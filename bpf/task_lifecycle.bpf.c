// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Cgroups made and removed, and processes that come and go, so that user space never has to look
 * through /proc or the cgroup tree to notice.
 *
 * Only cgroup events and the first executions in a job cross to user space. Forks and exits are
 * counted here, in the job's slot: a job that forks all day costs the collector nothing more.
 */
#include "job_slots.h"

/* The kernel hands its tracepoints at most this much of a path. */
#define PATH_SIZE 1024

enum event_kind {
	CGROUP_MADE = 1,
	CGROUP_REMOVED = 2,
	PROCESS_EXECUTED = 3,
};

struct event {
	u64 cgroup;
	u32 kind;
	u32 hierarchy_id;
	u32 slot;
	u32 inherited; /* the slot is that of the cgroup above */
	u32 pid;
	u32 path_size; /* with the terminating 0 */
	char path[PATH_SIZE];
};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 256 * 1024);
} lifecycle_events SEC(".maps");

/* Slots that user space has put up for cgroups to come. */
struct {
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__uint(max_entries, MAX_SLOTS);
	__type(value, u32);
} free_slots SEC(".maps");

struct losses {
	u64 submitted;
	u64 lost;	 /* the ring buffer was full */
	u64 slots_short; /* a cgroup was made while no slot was free */
	u64 moves;	 /* processes moved between cgroups */
	u64 renames;	 /* cgroups that changed their path (v1 only) */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct losses);
} losses SEC(".maps");

static __always_inline struct losses *the_losses(void)
{
	u32 key = 0;

	return bpf_map_lookup_elem(&losses, &key);
}

static __always_inline struct event *reserve(u32 kind, u64 cgroup)
{
	struct losses *loss = the_losses();
	struct event *event;

	if (!loss)
		return NULL;
	event = bpf_ringbuf_reserve(&lifecycle_events, sizeof(*event), 0);
	if (!event) {
		__sync_fetch_and_add(&loss->lost, 1);
		return NULL;
	}
	__sync_fetch_and_add(&loss->submitted, 1);
	event->kind = kind;
	event->cgroup = cgroup;
	event->hierarchy_id = config.hierarchy_id;
	event->slot = SLOT_SYSTEM;
	event->inherited = 0;
	event->pid = 0;
	event->path_size = 0;
	return event;
}

/*
 * A slot for a cgroup that has just been made: its job's, or else a free one. A free one is taken only
 * when user space will hear of it (`event`), since nobody else can give it back.
 */
static __always_inline void give_slot(u64 cgroup, u64 parent, struct event *event)
{
	struct slot_of_cgroup entry = {}, *above = bpf_map_lookup_elem(&slots, &parent);
	struct losses *loss;

	if (above && above->confirmed) {
		entry = *above;
	} else if (!event) {
		return;
	} else if (bpf_map_pop_elem(&free_slots, &entry.slot)) {
		entry.slot = SLOT_OVERFLOW;
		loss = the_losses();
		if (loss)
			__sync_fetch_and_add(&loss->slots_short, 1);
	}
	bpf_map_update_elem(&slots, &cgroup, &entry, BPF_NOEXIST);
	if (event) {
		event->slot = entry.slot;
		event->inherited = entry.confirmed;
	}
}

/* Of the hierarchy that tells jobs apart. */
static __always_inline void follow_cgroup(u32 kind, struct cgroup *cgroup, struct event *event)
{
	u64 id = cgroup->kn->id;

	if (kind == CGROUP_MADE)
		give_slot(id, BPF_CORE_READ(cgroup, self.parent, cgroup, kn, id), event);
	else
		bpf_map_delete_elem(&slots, &id);
}

static __always_inline void report_cgroup(u32 kind, struct cgroup *cgroup, const char *path)
{
	u32 hierarchy = cgroup->root->hierarchy_id;
	struct event *event = reserve(kind, cgroup->kn->id);
	long size;

	/* One test for both paths: verifiers before 6.18 forget at a second one that the event is there. */
	if (!event) {
		if (hierarchy == config.hierarchy_id)
			follow_cgroup(kind, cgroup, NULL);
		return;
	}
	if (hierarchy == config.hierarchy_id)
		follow_cgroup(kind, cgroup, event);
	event->hierarchy_id = hierarchy;
	size = bpf_probe_read_kernel_str(event->path, sizeof(event->path), path);
	event->path_size = size > 0 ? size : 0;
	bpf_ringbuf_submit(event, 0);
}

SEC("tp_btf/cgroup_mkdir")
int BPF_PROG(on_cgroup_mkdir, struct cgroup *cgroup, const char *path)
{
	report_cgroup(CGROUP_MADE, cgroup, path);
	return 0;
}

SEC("tp_btf/cgroup_rmdir")
int BPF_PROG(on_cgroup_rmdir, struct cgroup *cgroup, const char *path)
{
	report_cgroup(CGROUP_REMOVED, cgroup, path);
	return 0;
}

SEC("tp_btf/cgroup_rename")
int BPF_PROG(on_cgroup_rename, struct cgroup *cgroup, const char *path)
{
	struct losses *loss = the_losses();

	if (loss)
		__sync_fetch_and_add(&loss->renames, 1);
	return 0;
}

SEC("tp_btf/cgroup_attach_task")
int BPF_PROG(on_cgroup_attach, struct cgroup *to, const char *path, struct task_struct *task, bool group)
{
	struct losses *loss = the_losses();

	/* The cgroup it came from is not told, so user space looks at all of them. */
	if (loss && (u32)to->root->hierarchy_id == config.hierarchy_id)
		__sync_fetch_and_add(&loss->moves, 1);
	return 0;
}

SEC("tp_btf/sched_process_fork")
int BPF_PROG(on_fork, struct task_struct *parent, struct task_struct *child)
{
	struct totals *row;
	u32 slot;

	if (child->pid != child->tgid)
		return 0;
	slot = slot_of(cgroup_of(child));
	row = bpf_map_lookup_elem(&totals, &slot);
	if (row) {
		__sync_fetch_and_add(&row->forks, 1);
		__sync_fetch_and_add(&row->changes, 1);
	}
	return 0;
}

SEC("tp_btf/sched_process_exec")
int BPF_PROG(on_exec, struct task_struct *task)
{
	u64 cgroup = cgroup_of(task);
	u32 slot = slot_of(cgroup);
	struct totals *row = bpf_map_lookup_elem(&totals, &slot);
	struct event *event;

	if (!row)
		return 0;
	__sync_fetch_and_add(&row->changes, 1);
	__sync_fetch_and_add(&row->execs, 1);
	if (row->execs > row->exec_limit || slot <= SLOT_OVERFLOW)
		return 0;
	event = reserve(PROCESS_EXECUTED, cgroup);
	if (event) {
		event->slot = slot;
		event->pid = task->tgid;
		bpf_ringbuf_submit(event, 0);
	}
	return 0;
}

SEC("tp_btf/sched_process_exit")
int BPF_PROG(on_exit, struct task_struct *task)
{
	struct totals *row;
	u32 slot;

	/* Counted down before this point: 0 for the last thread of the process. */
	if (task->signal->live.counter != 0)
		return 0;
	slot = slot_of(cgroup_of(task));
	row = bpf_map_lookup_elem(&totals, &slot);
	if (row) {
		__sync_fetch_and_add(&row->exits, 1);
		__sync_fetch_and_add(&row->changes, 1);
	}
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
