// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * CPU events per job, charged when a CPU crosses from one job to another.
 *
 * A switch within a job, or to the idle task, reads no counter: what the CPU counts until the next
 * crossing is still that job's. Most events are not counted here at all but taken from what the
 * scheduler counts per CPU and per task anyway.
 */
#include "job_slots.h"

#define ENOENT 2

/*
 * What is known of one CPU. Only that CPU writes its row, with interrupts off or from one, and while it
 * is dead the CPU that has taken it down.
 */
struct cpu_state {
	u64 cgroup;	 /* of the task that ran last, idle aside */
	u32 slot;	 /* to which everything since the last charge belongs */
	u32 started;	 /* the baselines below are set */
	u32 task;	 /* pid that runs, as far as is known; 0: idle */
	u32 left;	 /* pid that left last, idle aside */
	u64 idle_since;	 /* run-queue task clock when it went idle; 0: not idle */
	u64 idle_ns;	 /* idle since the last charge */
	u64 wait_ns;	 /* waited on run queues by the tasks that ran since the last charge */
	u64 page_faults; /* of tasks that ran since the last charge, up to their last switch */
	u64 task_faults; /* of `task`, when that sum was made */
	/* A cache line further: what crossings and user space want. */
	u64 left_faults; /* of `left`, when it left */
	u64 rq;		 /* address of the CPU's run queue */
	u64 clock;	 /* run-queue task clock at the last charge */
	u64 switches;	 /* away from tasks since boot, at the last charge */
	u64 nr_switches; /* all switches since boot, at the last charge */
	u64 read_errors; /* hardware counters that could not be read */
	u32 pending;	 /* written by `scan`: there is something to charge */
	u32 owned;	 /* written by user space: charged by owner, the switch hook is off */
	u32 events_lost; /* how often its perf events may have died */
	u32 unused[3];
	struct bpf_perf_event_value counters[COUNTERS]; /* at the last charge */
};
/* Rows start on cache lines. */
_Static_assert(sizeof(struct cpu_state) == 256, "user space reads rows of this size");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_CPUS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct cpu_state);
} cpus SEC(".maps");

/* Counter i of CPU c stands at i * config.cpus + c. */
struct {
	__uint(type, BPF_MAP_TYPE_PERF_EVENT_ARRAY);
	__uint(max_entries, COUNTERS *MAX_CPUS);
	__type(key, u32);
	__type(value, u32);
} events SEC(".maps");

/* How often a CPU came or went, for user space to look at the others only then. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, u64);
} hotplugs SEC(".maps");

/*
 * How long a task had waited in all when it last came to a CPU. A queued task that is pulled to another
 * CPU has its wait so far booked at the moment of the pull, unseen from here; the difference against
 * this table finds it again. Two pids that share a row lose that part and nothing else.
 */
#define DELAY_ROWS 65536
struct run_delay {
	u32 pid;
	u32 unused;
	u64 total;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, DELAY_ROWS);
	__type(key, u32);
	__type(value, struct run_delay);
} delays SEC(".maps");

/* What a run queue says at one moment. */
struct reading {
	u64 clock;
	u64 nr_switches;
	u64 switches; /* away from tasks: all but the idle task's own */
};

static __always_inline void add(u64 *total, u64 amount)
{
	/* No negative amounts, whatever a counter does. */
	if ((s64)amount > 0)
		__sync_fetch_and_add(total, amount);
}

static __always_inline void charge_counter(struct cpu_state *state, struct totals *slot, u32 cpu, u32 i)
{
	struct bpf_perf_event_value now, *last = &state->counters[i];
	long error;

	if (!(config.counters & (1 << i)))
		return;
	error = bpf_perf_event_read_value(&events, i * config.cpus + cpu, &now, sizeof(now));
	if (error) {
		/* Not open on this CPU: user space knows that. */
		if (error != -ENOENT)
			state->read_errors++;
		return;
	}
	if (state->started) {
		add(&slot->counters[i].value, now.counter - last->counter);
		add(&slot->counters[i].enabled, now.enabled - last->enabled);
		add(&slot->counters[i].running, now.running - last->running);
	}
	*last = now;
}

/*
 * Book everything since the last charge to the slot that the CPU was on. Without the switch hook
 * nobody tells idle time, waits and faults apart, so they are left out.
 */
static __always_inline void charge(struct cpu_state *state, const struct reading *now, u32 cpu, bool hooked,
				   bool counters)
{
	u32 number = state->slot;
	struct totals *slot = bpf_map_lookup_elem(&totals, &number);

	if (!slot)
		return;
	if (state->started) {
		add(&slot->switches, now->switches - state->switches);
		if (hooked) {
			add(&slot->run_ns, now->clock - state->clock - state->idle_ns);
			add(&slot->wait_ns, state->wait_ns);
			add(&slot->page_faults, state->page_faults);
		}
	}
	if (counters) {
		charge_counter(state, slot, cpu, 0);
		charge_counter(state, slot, cpu, 1);
		charge_counter(state, slot, cpu, 2);
		charge_counter(state, slot, cpu, 3);
		charge_counter(state, slot, cpu, 4);
	}
	state->clock = now->clock;
	state->switches = now->switches;
	state->nr_switches = now->nr_switches;
	state->idle_ns = 0;
	state->wait_ns = 0;
	state->page_faults = 0;
	state->started = 1;
}

/* The CPU turns to another cgroup. Out of the way, so that the common path stays short. */
static __noinline int cross(struct cpu_state *state, const struct rq *rq, u32 cpu, u64 cgroup)
{
	const struct task_struct *idle = rq->idle;
	struct reading now = {
		.clock = rq->clock_task,
		.nr_switches = rq->nr_switches,
		.switches = rq->nr_switches - idle->nvcsw - idle->nivcsw,
	};
	u32 slot = slot_of(cgroup);

	state->cgroup = cgroup;
	if (slot == state->slot && state->started)
		return 0;
	charge(state, &now, cpu, true, true);
	state->slot = slot;
	return 0;
}

static __always_inline struct run_delay *delay_row(u32 pid)
{
	u32 row = pid % DELAY_ROWS;

	return bpf_map_lookup_elem(&delays, &row);
}

/*
 * `prev` is not the task that was last seen to come: a switch was missed. Some kernels hide switches
 * away from init's threads from BPF, and the hook may just have been attached. The scheduler knows
 * when `prev` came, so the time is still divided exactly; hardware counters go to whoever ran longer.
 */
static __noinline int missed(struct cpu_state *state, const struct rq *rq, struct task_struct *prev, u32 cpu)
{
	const struct task_struct *idle = rq->idle;
	struct reading then = {
		.nr_switches = state->nr_switches,
		/* All but the one that is happening now, away from `prev`. */
		.switches = rq->nr_switches - idle->nvcsw - idle->nivcsw - 1,
	};
	u32 pid = prev->pid, slot;
	struct run_delay *row;
	u64 now = rq->clock_task, came;

	if (!state->started)
		return 0;
	if (!pid) {
		came = prev->se.exec_start;
		state->idle_since = came > state->clock && came <= now ? came : 0;
		return 0;
	}
	state->idle_since = 0;
	came = now - (rq->clock - prev->sched_info.last_arrival);
	if ((s64)(came - state->clock) < 0)
		came = state->clock;
	state->cgroup = cgroup_of(prev);
	slot = slot_of(state->cgroup);
	if (slot != state->slot) {
		then.clock = came;
		charge(state, &then, cpu, true, came - state->clock > now - came);
		state->slot = slot;
	}
	row = delay_row(pid);
	if (row && row->pid == pid) {
		if (prev->sched_info.run_delay > row->total)
			state->wait_ns += prev->sched_info.run_delay - row->total;
		row->total = prev->sched_info.run_delay;
	}
	/* It was away for the missed switch alone: its faults since are those of this run. */
	if (pid == state->left)
		state->page_faults += prev->min_flt + prev->maj_flt - state->left_faults;
	return 0;
}

SEC("tp_btf/sched_switch")
int BPF_PROG(on_switch, bool preempt, struct task_struct *prev, struct task_struct *next)
{
	u32 cpu = bpf_get_smp_processor_id();
	struct cpu_state *state = bpf_map_lookup_elem(&cpus, &cpu);
	/* The kernel's per-CPU symbols cannot be found on every build; a task leads there on all. */
	const struct rq *rq = prev->se.cfs_rq->rq;
	struct run_delay *row;
	u32 pid;
	u64 cgroup, delay, faults, queued, total;

	if (!state)
		return 0;
	pid = prev->pid;
	if (pid != state->task)
		missed(state, rq, prev, cpu);
	if (pid) {
		faults = prev->min_flt + prev->maj_flt;
		if (pid == state->task)
			state->page_faults += faults - state->task_faults;
		state->left = pid;
		state->left_faults = faults;
	} else if (state->idle_since) {
		state->idle_ns += rq->clock_task - state->idle_since;
		state->idle_since = 0;
	}
	pid = next->pid;
	state->task = pid;
	if (!pid) {
		state->idle_since = rq->clock_task;
		return 0;
	}
	state->task_faults = next->min_flt + next->maj_flt;
	cgroup = cgroup_of(next);
	if (cgroup != state->cgroup)
		cross(state, rq, cpu, cgroup);

	/* The scheduler books the wait of `next` right after this tracepoint, by the same clock. */
	queued = next->sched_info.last_queued;
	delay = queued && rq->clock > queued ? rq->clock - queued : 0;
	total = next->sched_info.run_delay;
	row = delay_row(pid);
	if (row) {
		if (row->pid == pid && total > row->total)
			state->wait_ns += total - row->total;
		row->pid = pid;
		row->total = total + delay;
	}
	state->wait_ns += delay;
	return 0;
}

SEC("tp_btf/sched_migrate_task")
int BPF_PROG(on_migrate, struct task_struct *task, int to)
{
	u32 slot = slot_of(cgroup_of(task));
	struct totals *row = bpf_map_lookup_elem(&totals, &slot);

	if (row)
		__sync_fetch_and_add(&row->migrations, 1);
	return 0;
}

/*
 * Run by user space once a tick, anywhere: which CPUs have something to charge? A CPU that was idle
 * all the time has not, and is left asleep.
 */
SEC("raw_tp")
int scan(void *unused)
{
	struct cpu_state *state;
	struct rq *rq;
	u32 cpu;

	for (cpu = 0; cpu < MAX_CPUS && cpu < config.cpus; cpu++) {
		u32 key = cpu;

		state = bpf_map_lookup_elem(&cpus, &key);
		if (!state)
			continue;
		rq = (struct rq *)state->rq;
		state->pending = !state->started || BPF_CORE_READ(rq, nr_switches) != state->nr_switches ||
				 BPF_CORE_READ(rq, curr, pid) != 0;
	}
	return 0;
}

static __always_inline struct rq *rq_here(struct task_struct *current)
{
	return BPF_CORE_READ(current, se.cfs_rq, rq);
}

static __always_inline void read_rq(struct rq *rq, struct reading *now)
{
	now->clock = BPF_CORE_READ(rq, clock_task);
	now->nr_switches = BPF_CORE_READ(rq, nr_switches);
	now->switches = now->nr_switches - BPF_CORE_READ(rq, idle, nvcsw) - BPF_CORE_READ(rq, idle, nivcsw);
}

static __always_inline u64 faults_of(struct task_struct *task)
{
	return BPF_CORE_READ(task, min_flt) + BPF_CORE_READ(task, maj_flt);
}

/* As `missed`, for a task that runs and was not seen to come: what was before it came is not its job's. */
static __always_inline void missed_current(struct cpu_state *state, const struct reading *now, struct rq *rq,
					   struct task_struct *current, u32 cpu)
{
	u64 came = now->clock - (BPF_CORE_READ(rq, clock) - BPF_CORE_READ(current, sched_info.last_arrival));
	u64 cgroup = cgroup_of_address(current);
	struct reading then = *now;
	u32 slot = slot_of(cgroup);

	if ((s64)(came - state->clock) < 0)
		came = state->clock;
	then.clock = came;
	state->cgroup = cgroup;
	if (slot != state->slot) {
		charge(state, &then, cpu, true, came - state->clock > now->clock - came);
		state->slot = slot;
	}
}

/*
 * Run by user space on a CPU that `scan` named (in an interrupt there, so no switch can happen in
 * between): charge it now, and look again to which slot it belongs. The cgroup of a task can change
 * while it runs, and so can the slot of a cgroup.
 */
SEC("raw_tp")
int flush(void *unused)
{
	u32 cpu = bpf_get_smp_processor_id();
	struct cpu_state *state = bpf_map_lookup_elem(&cpus, &cpu);
	struct task_struct *current = (struct task_struct *)bpf_get_current_task();
	struct rq *rq = rq_here(current);
	u32 pid = BPF_CORE_READ(current, pid);
	struct reading now;
	u64 faults;

	if (!state)
		return 0;
	read_rq(rq, &now);
	state->rq = (u64)rq;
	if (pid == 0) {
		if (state->idle_since)
			state->idle_ns += now.clock - state->idle_since;
		state->idle_since = now.clock;
	} else {
		faults = faults_of(current);
		if (state->task == pid)
			state->page_faults += faults - state->task_faults;
		state->task_faults = faults;
		if (state->task && state->task != pid && state->started)
			missed_current(state, &now, rq, current, cpu);
	}
	state->task = pid;
	charge(state, &now, cpu, true, true);
	if (pid != 0)
		state->cgroup = cgroup_of_address(current);
	state->slot = slot_of(state->cgroup);
	return 0;
}

/* As `flush`, for the CPUs that jobs own: charged by owner, whatever runs there, with no hook. */
SEC("raw_tp")
int flush_owned(void *unused)
{
	u32 cpu = bpf_get_smp_processor_id();
	struct cpu_state *state = bpf_map_lookup_elem(&cpus, &cpu);
	struct task_struct *current = (struct task_struct *)bpf_get_current_task();
	struct rq *rq = rq_here(current);
	struct reading now;

	if (!state)
		return 0;
	read_rq(rq, &now);
	state->rq = (u64)rq;
	charge(state, &now, cpu, false, true);
	/* What only the hook keeps up to date starts anew with it. */
	state->task = 0;
	state->idle_since = BPF_CORE_READ(current, pid) == 0 ? now.clock : 0;
	return 0;
}

/*
 * A CPU that goes offline takes its perf events with it: they stop for good, and read as before. So
 * they are opened anew by user space, which is told here. The last switch, to idle, is not shown to
 * BPF; when the CPU is dead and nobody can bring it back yet, its row is put in order.
 */
SEC("tp_btf/cpuhp_exit")
int BPF_PROG(on_hotplug, unsigned int cpu, int reached, int step, int error)
{
	bool events = step == (int)bpf_core_enum_value(enum cpuhp_state, CPUHP_AP_PERF_ONLINE);
	bool dead = step == (int)bpf_core_enum_value(enum cpuhp_state, CPUHP_TEARDOWN_CPU) && !error;
	u32 key = cpu, only = 0;
	struct cpu_state *state = bpf_map_lookup_elem(&cpus, &key);
	u64 *count = bpf_map_lookup_elem(&hotplugs, &only);
	struct reading now;

	if (!state || !count || !(events || dead))
		return 0;
	if (events) {
		/* On the CPU itself, in a thread of the kernel's. */
		state->rq = (u64)rq_here((struct task_struct *)bpf_get_current_task());
		state->events_lost++;
	}
	__sync_fetch_and_add(count, 1);
	if (!state->rq)
		return 0; /* it has never got as far as running anything */
	read_rq((struct rq *)state->rq, &now);
	if (dead) {
		if (state->idle_since)
			state->idle_ns += now.clock - state->idle_since;
		charge(state, &now, cpu, !state->owned, false);
		state->task = 0;
		state->idle_since = now.clock;
	} else if (!state->started) {
		charge(state, &now, cpu, false, false);
	}
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
