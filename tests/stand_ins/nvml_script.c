/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The script beside the library: read when it has changed, kept as a sorted list of statements. Also the counts of
 * calls, in a file that is mapped by whoever wants to read them.
 */
#define _GNU_SOURCE
#include "nvml_script.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define LOOK_MS 10 /* how often a call that hangs looks at the script */
#define HANG_MAX_S 120

int initialised;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct device handles[MAX_DEVICES][1 + MAX_INSTANCES];

/* `key` is SUBJECT and NAME, a space between. Both point into `script`. */
struct statement {
	const char *key;
	const char *value;
};
static char *script;
static struct statement *statements;
static size_t statement_count;
static int any_orders; /* whether there are statements that are not figures but say what a function does */
static struct event *events;
static size_t event_count;
static struct timespec script_time;
static ino_t script_inode;
static char script_path[PATH_MAX];

/* A line of the file of counts; Python reads it as "=56sQ". */
struct count {
	char name[56];
	_Atomic uint64_t calls;
};
#define COUNTS (3 * SLOTS_EACH)
static struct count *counts;

nvmlDevice_t handle_of(int device, int instance)
{
	return &handles[device][1 + instance];
}

__attribute__((constructor)) static void find_files(void)
{
	char library[PATH_MAX], path[PATH_MAX];
	Dl_info info;
	int fd;

	for (int device = 0; device < MAX_DEVICES; device++)
		for (int instance = -1; instance < MAX_INSTANCES; instance++)
			handles[device][1 + instance] = (struct device){device, instance};
	if (!dladdr(&mutex, &info) || !realpath(info.dli_fname, library))
		return;
	*strrchr(library, '/') = 0;
	if (snprintf(script_path, sizeof(script_path), "%s/script", library) >= (int)sizeof(script_path) ||
	    snprintf(path, sizeof(path), "%s/calls", library) >= (int)sizeof(path))
		return;
	fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
	if (fd < 0)
		return;
	if (ftruncate(fd, COUNTS * sizeof(*counts)) == 0)
		counts = mmap(NULL, COUNTS * sizeof(*counts), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (counts == MAP_FAILED)
		counts = NULL;
	close(fd);
}

unsigned long long now_us(void)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	return now.tv_sec * 1000000ULL + now.tv_nsec / 1000;
}

/* ---- reading */

static int by_key(const void *a, const void *b)
{
	return strcmp(((const struct statement *)a)->key, ((const struct statement *)b)->key);
}

static void keep_event(const char *key, const char *value)
{
	struct event event = {.gpu_instance = UINT_MAX, .compute_instance = UINT_MAX};

	if (sscanf(key, "%d event.%llu", &event.device, &event.number) == 2 &&
	    sscanf(value, "%llu %llu %u %u", &event.type, &event.data, &event.gpu_instance, &event.compute_instance) >=
		    2)
		events[event_count++] = event;
}

static int is_order(const char *name)
{
	static const char *const verbs[] = {"fail.", "hang.", "delay.", "crash."};

	for (unsigned int i = 0; i < sizeof(verbs) / sizeof(*verbs); i++)
		if (!strncmp(name, verbs[i], strlen(verbs[i])))
			return 1;
	return 0;
}

static void parse(char *text)
{
	size_t lines = 1;
	char *rest;

	for (const char *at = text; *at; at++)
		lines += *at == '\n';
	statements = realloc(statements, lines * sizeof(*statements));
	events = realloc(events, lines * sizeof(*events));
	if (!statements || !events)
		abort();
	statement_count = event_count = 0;
	any_orders = 0;
	for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
		char *name = strchr(line, ' ');
		char *value = name ? strchr(name + 1, ' ') : NULL;

		if (line[0] == '#' || !value)
			continue;
		*value++ = 0;
		any_orders |= is_order(name + 1);
		if (!strncmp(name + 1, "event.", 6))
			keep_event(line, value);
		else
			statements[statement_count++] = (struct statement){line, value};
	}
	qsort(statements, statement_count, sizeof(*statements), by_key);
}

static void read_script(void)
{
	struct stat status;
	ssize_t length;
	char *text;
	int fd;

	/* Looking at the name is cheap; the file is replaced as a whole, so that what is opened is complete. */
	if (stat(script_path, &status) ||
	    (status.st_ino == script_inode && status.st_mtim.tv_sec == script_time.tv_sec &&
	     status.st_mtim.tv_nsec == script_time.tv_nsec))
		return;
	fd = open(script_path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return;
	if (fstat(fd, &status) || !(text = malloc(status.st_size + 1)))
		abort();
	length = read(fd, text, status.st_size);
	close(fd);
	text[length < 0 ? 0 : length] = 0;
	parse(text);
	free(script);
	script = text;
	script_inode = status.st_ino;
	script_time = status.st_mtim;
}

/* ---- looking up */

static const char *value_of(const char *subject, const char *name)
{
	char key[160];
	struct statement wanted = {key, NULL}, *found;

	snprintf(key, sizeof(key), "%s %s", subject, name);
	found = bsearch(&wanted, statements, statement_count, sizeof(*statements), by_key);
	return found ? found->value : NULL;
}

static void subject_of(nvmlDevice_t device, char *to, size_t length)
{
	if (!device)
		snprintf(to, length, "system");
	else if (device->instance < 0)
		snprintf(to, length, "%d", device->device);
	else
		snprintf(to, length, "%d/%d", device->device, device->instance);
}

const char *attribute(nvmlDevice_t device, const char *key)
{
	char subject[32];

	subject_of(device, subject, sizeof(subject));
	return value_of(subject, key);
}

nvmlReturn_t error_in(const char *text)
{
	return strncmp(text, "error ", 6) ? NVML_SUCCESS : (nvmlReturn_t)strtoul(text + 6, NULL, 10);
}

nvmlReturn_t text(nvmlDevice_t device, const char *key, char *to, unsigned int length)
{
	const char *value = attribute(device, key);

	if (!value)
		return NVML_ERROR_NOT_SUPPORTED;
	if (error_in(value))
		return error_in(value);
	if (!to)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (strlen(value) >= length)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	strcpy(to, value);
	return NVML_SUCCESS;
}

nvmlReturn_t number(nvmlDevice_t device, const char *key, unsigned long long *to)
{
	const char *value = attribute(device, key), *since, *rate;
	char name[96];

	if (!value)
		return NVML_ERROR_NOT_SUPPORTED;
	if (error_in(value))
		return error_in(value);
	if (!to)
		return NVML_ERROR_INVALID_ARGUMENT;
	*to = value[0] == '-' ? (unsigned long long)strtoll(value, NULL, 10) : strtoull(value, NULL, 10);
	snprintf(name, sizeof(name), "%s_rate", key);
	since = attribute(device, "auto");
	rate = since ? attribute(device, name) : NULL;
	if (rate)
		*to += strtod(rate, NULL) * 1e-6 * (now_us() - strtoull(since, NULL, 10));
	return NVML_SUCCESS;
}

nvmlReturn_t small_number(nvmlDevice_t device, const char *key, unsigned int *to)
{
	unsigned long long value;
	nvmlReturn_t result = number(device, key, to ? &value : NULL);

	if (result == NVML_SUCCESS)
		*to = value;
	return result;
}

unsigned long long number_or(nvmlDevice_t device, const char *key, unsigned long long otherwise)
{
	unsigned long long value;

	return number(device, key, &value) == NVML_SUCCESS ? value : otherwise;
}

unsigned int device_count(void)
{
	unsigned long long count = number_or(NULL, "devices", 0);

	return count < MAX_DEVICES ? count : MAX_DEVICES;
}

int mig_enabled(nvmlDevice_t device)
{
	return number_or(handle_of(device->device, -1), "mig_mode", 0) == 1;
}

int next_event(unsigned long long number, int (*wanted)(const void *context, const struct event *event),
	       const void *context, struct event *to)
{
	for (size_t i = 0; i < event_count; i++)
		if (events[i].number > number && wanted(context, &events[i])) {
			*to = events[i];
			return 1;
		}
	return 0;
}

unsigned long long last_event(void)
{
	return event_count ? events[event_count - 1].number : 0;
}

/* ---- calls */

/* What the script wants of a function: `SUBJECT VERB.FUNCTION VALUE`, the most particular statement first. */
static const char *wanted(const char *verb, const char *function, nvmlDevice_t device)
{
	char family[96], own[32], whole[32], name[128];
	const char *functions[] = {function, family, "*"};
	const char *subjects[] = {"*", "*", "*"};
	const char *value = NULL;
	size_t length;

	if (!any_orders) /* so that a bench does not measure the looking up */
		return NULL;
	/* The family has one name for all versions of a function. */
	snprintf(family, sizeof(family), "%s", strncmp(function, "nvmlInit", 8) ? function : "nvmlInit");
	length = strlen(family);
	if (length > 3 && family[length - 3] == '_' && family[length - 2] == 'v')
		family[length - 3] = 0;
	if (device) {
		subject_of(device, own, sizeof(own));
		subjects[0] = subjects[1] = own;
	}
	for (int i = 0; i < 3 && !value; i++) {
		snprintf(name, sizeof(name), "%s.%s", verb, functions[i]);
		if (i == 2 && device && device->instance >= 0) {
			/* What befalls all of a GPU befalls its instances. */
			subject_of(handle_of(device->device, -1), whole, sizeof(whole));
			subjects[1] = whole;
		}
		for (int j = 0; j < 3 && !value; j++)
			value = value_of(subjects[j], name);
	}
	return value;
}

static void sleep_ms(unsigned int ms)
{
	struct timespec left = {ms / 1000, ms % 1000 * 1000000L};

	while (nanosleep(&left, &left) && errno == EINTR)
		;
}

void pause_call(unsigned int ms)
{
	pthread_mutex_unlock(&mutex);
	sleep_ms(ms);
	pthread_mutex_lock(&mutex);
	read_script();
}

static int is_handle(nvmlDevice_t device)
{
	const char *first = (const char *)handles, *at = (const char *)device;

	return at >= first && at < first + sizeof(handles) && (at - first) % sizeof(struct device) == 0;
}

static void be_slow(const char *name, nvmlDevice_t device)
{
	const char *value = wanted("delay", name, device);
	unsigned long long began = now_us();

	if (value)
		pause_call(strtoul(value, NULL, 10));
	while (wanted("hang", name, device) && now_us() - began < HANG_MAX_S * 1000000ULL)
		pause_call(LOOK_MS);
}

nvmlReturn_t failure(const char *function, nvmlDevice_t device)
{
	const char *code = wanted("fail", function, device);

	return code ? (nvmlReturn_t)strtoul(code, NULL, 10) : NVML_SUCCESS;
}

static nvmlReturn_t refusal(const char *name, nvmlDevice_t device, int kind)
{
	nvmlReturn_t result = failure(name, device);

	if (kind != BEFORE_INIT && !initialised)
		return NVML_ERROR_UNINITIALIZED;
	if (result != NVML_SUCCESS)
		return result;
	if (!(kind & NO_DEVICE) &&
	    (((kind & WHOLE) && device->instance >= 0) || ((kind & NOT_IN_MIG) == NOT_IN_MIG && mig_enabled(device))))
		return NVML_ERROR_NOT_SUPPORTED;
	return NVML_SUCCESS;
}

struct call enter(int slot, const char *name, nvmlDevice_t device, int kind)
{
	if (counts) {
		if (!counts[slot].name[0])
			strncpy(counts[slot].name, name, sizeof(counts[slot].name) - 1);
		atomic_fetch_add(&counts[slot].calls, 1);
	}
	pthread_mutex_lock(&mutex);
	read_script();
	if (!(kind & NO_DEVICE) && !is_handle(device))
		return (struct call){initialised ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_UNINITIALIZED, 1};
	if (wanted("crash", name, device)) {
		signal(SIGSEGV, SIG_DFL);
		raise(SIGSEGV);
	}
	be_slow(name, device);
	return (struct call){refusal(name, device, kind), 1};
}

void leave(struct call *call)
{
	if (call->open)
		pthread_mutex_unlock(&mutex);
}
