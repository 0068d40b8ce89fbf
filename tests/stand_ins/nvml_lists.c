/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in's answers that are lists, and what is waited for: samples, processes, events, GPM. */
#include "nvml_script.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SLOTS FIRST_SLOT(2)
#define AUTO_SAMPLE_US 100000ULL
#define SAMPLES 120 /* that NVML keeps */

#ifndef PROCESS_LISTS
#define PROCESS_LISTS 3
#endif
#ifndef RECORD_V3
#define RECORD_V3 nvmlProcessInfo_v2_t
#endif

/* The part of a list after the one at `at`; items are separated by spaces. */
static const char *next_item(const char *at)
{
	at = strchr(at, ' ');
	return at ? at + 1 : NULL;
}

/* ---- samples */

/* NVML_*_SAMPLES, from 0 */
static const char *const samplings[] = {"power",   "utilization", "memory_utilization", "encoder",
					"decoder", "sm_clock",	  "memory_clock"};

struct samples {
	unsigned long long since;
	nvmlSample_t *to;
	unsigned int count, room;
};

static void add_sample(struct samples *samples, unsigned long long time, unsigned int value)
{
	if (time <= samples->since || samples->count == samples->room)
		return;
	samples->to[samples->count++] = (nvmlSample_t){time, {.ullVal = value}};
}

static void add_listed(struct samples *samples, const char *list)
{
	unsigned long long time;
	unsigned int value;

	for (; list; list = next_item(list))
		if (sscanf(list, "%llu:%u", &time, &value) == 2)
			add_sample(samples, time, value);
}

/* Those of the time since `first`, as far as NVML keeps them. */
static void add_automatic(struct samples *samples, unsigned long long first, unsigned int value)
{
	unsigned long long now = now_us();

	if (first + SAMPLES * AUTO_SAMPLE_US < now)
		first = now - SAMPLES * AUTO_SAMPLE_US;
	for (unsigned long long at = (first / AUTO_SAMPLE_US + 1) * AUTO_SAMPLE_US; at <= now; at += AUTO_SAMPLE_US)
		add_sample(samples, at, value);
}

EXPORT nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, unsigned int type, unsigned long long since,
					 unsigned int *value_type, unsigned int *count, nvmlSample_t *to)
{
	const char *list, *first;
	struct samples samples;
	char key[48];

	BEGIN(device, WHOLE);
	if (!count || !value_type || type >= sizeof(samplings) / sizeof(*samplings) || (to && !*count))
		return NVML_ERROR_INVALID_ARGUMENT;
	if (type >= 1 && type <= 4 && mig_enabled(device))
		return NVML_ERROR_NOT_SUPPORTED;
	snprintf(key, sizeof(key), "samples.%s", samplings[type]);
	list = attribute(device, key);
	first = type == 1 || type == 2 ? attribute(device, "auto") : NULL;
	if (!list && !first)
		return NVML_ERROR_NOT_SUPPORTED;
	if (list && error_in(list))
		return error_in(list);
	*value_type = TYPE_UINT;
	if (!to) {
		*count = SAMPLES;
		return NVML_SUCCESS;
	}
	samples = (struct samples){since, to, 0, *count};
	if (list)
		add_listed(&samples, list);
	else
		add_automatic(&samples, strtoull(first, NULL, 10), number_or(device, samplings[type], 0));
	*count = samples.count;
	return samples.count ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *to,
						    unsigned int *count, unsigned long long since)
{
	nvmlProcessUtilizationSample_t sample;
	unsigned int found = 0, room;
	const char *list;

	BEGIN(device, NOT_IN_MIG);
	if (!count)
		return NVML_ERROR_INVALID_ARGUMENT;
	room = to ? *count : 0;
	list = attribute(device, "process_samples");
	if (!list)
		return NVML_ERROR_NOT_SUPPORTED;
	if (error_in(list))
		return error_in(list);
	for (; list; list = next_item(list)) {
		memset(&sample, 0, sizeof(sample));
		if (sscanf(list, "%llu:%u:%u:%u:%u:%u", &sample.timeStamp, &sample.pid, &sample.smUtil, &sample.memUtil,
			   &sample.encUtil, &sample.decUtil) != 6 ||
		    sample.timeStamp <= since)
			continue;
		if (found < room)
			to[found] = sample;
		found++;
	}
	if (!found)
		return NVML_ERROR_NOT_FOUND;
	*count = found;
	if (!to)
		*count -= number_or(device, "understated", 0);
	return found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

/* ---- processes */

#if PROCESS_LISTS > 0
/* Into records of `size` bytes, with more or fewer of the fields. */
static unsigned int add_processes(nvmlDevice_t device, const char *key, void *to, size_t size, unsigned int count,
				  unsigned int room)
{
	for (const char *list = attribute(device, key); list; list = next_item(list)) {
		nvmlProcessDetail_v1_t info = {.usedGpuMemory = ULLONG_MAX,
					       .gpuInstanceId = number_or(device, "gpu_instance", UINT_MAX),
					       .computeInstanceId = number_or(device, "compute_instance", UINT_MAX)};

		if (sscanf(list, "%u:%llu", &info.pid, &info.usedGpuMemory) < 1)
			break;
		if (count < room)
			memcpy((char *)to + count * size, &info, size);
		count++;
	}
	return count;
}

static nvmlReturn_t processes(nvmlDevice_t device, const char *key, unsigned int *count, void *to, size_t size)
{
	const char *list = attribute(device, key);
	unsigned int found, room;

	if (!count || (*count && !to))
		return NVML_ERROR_INVALID_ARGUMENT;
	if (list && error_in(list))
		return error_in(list);
	room = *count;
	found = add_processes(device, key, to, size, 0, room);
	/* A GPU that is cut lists what runs in its instances. */
	for (int instance = 0; device->instance < 0 && mig_enabled(device) && instance < MAX_INSTANCES; instance++)
		found = add_processes(handle_of(device->device, instance), key, to, size, found, room);
	*count = found;
	if (found > room && !to)
		*count -= number_or(device, "understated", 0);
	return found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

#define PROCESSES(function, key, record)                                                                               \
	EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned int *count, record *to)                             \
	{                                                                                                              \
		BEGIN(device, ANY);                                                                                    \
		return processes(device, "processes." key, count, to, sizeof(*to));                                    \
	}                                                                                                              \
	static_assert(1, "")

PROCESSES(nvmlDeviceGetComputeRunningProcesses, "compute", nvmlProcessInfo_v1_t);
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, "graphics", nvmlProcessInfo_v1_t);
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses, "mps", nvmlProcessInfo_v1_t);
#if PROCESS_LISTS > 1
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, "compute", nvmlProcessInfo_v2_t);
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, "graphics", nvmlProcessInfo_v2_t);
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, "mps", nvmlProcessInfo_v2_t);
#endif
#if PROCESS_LISTS > 2
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, "compute", RECORD_V3);
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics", RECORD_V3);
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps", RECORD_V3);
#endif
#endif

/* ---- events */

struct event_set {
	unsigned long long delivered; /* number of the last */
	struct {
		unsigned long long types;
		unsigned long long since; /* number of the last event before the registration */
	} devices[MAX_DEVICES];
};

EXPORT nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
	BEGIN(NULL, NO_DEVICE);
	if (!set)
		return NVML_ERROR_INVALID_ARGUMENT;
	*set = calloc(1, sizeof(**set));
	return *set ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
}

EXPORT nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
	BEGIN(NULL, NO_DEVICE);
	free(set);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
	BEGIN(device, WHOLE);
	return number(device, "event_types", types);
}

EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
	unsigned long long supported;
	nvmlReturn_t result;

	BEGIN(device, WHOLE);
	if (!set)
		return NVML_ERROR_INVALID_ARGUMENT;
	result = number(device, "event_types", &supported);
	if (result != NVML_SUCCESS)
		return result;
	if (types & ~supported)
		return NVML_ERROR_NOT_SUPPORTED;
	set->devices[device->device].types |= types;
	set->devices[device->device].since = last_event();
	return NVML_SUCCESS;
}

static int is_wanted(const void *context, const struct event *event)
{
	const struct event_set *set = context;

	return event->device >= 0 && event->device < MAX_DEVICES && event->type & set->devices[event->device].types &&
	       event->number > set->devices[event->device].since;
}

static nvmlReturn_t wait_for_event(nvmlEventSet_t set, nvmlEventData_t *to, unsigned int timeout_ms)
{
	unsigned long long until = now_us() + timeout_ms * 1000ULL;
	struct event event;

	if (!set || !to)
		return NVML_ERROR_INVALID_ARGUMENT;
	while (!next_event(set->delivered, is_wanted, set, &event)) {
		for (int device = 0; device < MAX_DEVICES; device++)
			if (set->devices[device].types && failure("*", handle_of(device, -1)) == NVML_ERROR_GPU_IS_LOST)
				return NVML_ERROR_GPU_IS_LOST;
		if (now_us() >= until)
			return NVML_ERROR_TIMEOUT;
		pause_call(1);
	}
	set->delivered = event.number;
	*to = (nvmlEventData_t){handle_of(event.device, -1), event.type, event.data, event.gpu_instance,
				event.compute_instance};
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *to, unsigned int timeout_ms)
{
	BEGIN(NULL, NO_DEVICE);
	return wait_for_event(set, to, timeout_ms);
}

#ifndef OLD_DRIVER
EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *to, unsigned int timeout_ms)
{
	BEGIN(NULL, NO_DEVICE);
	return wait_for_event(set, to, timeout_ms);
}
#endif

/* ---- GPM */

#ifndef WITHOUT_GPM
struct gpm_sample {
	nvmlDevice_t device; /* NULL: nothing yet */
	unsigned long long number;
};

EXPORT nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *sample)
{
	BEGIN(NULL, NO_DEVICE);
	if (!sample)
		return NVML_ERROR_INVALID_ARGUMENT;
	*sample = calloc(1, sizeof(**sample));
	return *sample ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
}

EXPORT nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample)
{
	BEGIN(NULL, NO_DEVICE);
	if (!sample)
		return NVML_ERROR_INVALID_ARGUMENT;
	free(sample);
	return NVML_SUCCESS;
}

static nvmlReturn_t take_sample(nvmlDevice_t whole, nvmlDevice_t device, nvmlGpmSample_t sample)
{
	static unsigned long long taken;

	if (!sample)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (!number_or(whole, "gpm_supported", 0))
		return NVML_ERROR_NOT_SUPPORTED;
	*sample = (struct gpm_sample){device, ++taken};
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, nvmlGpmSample_t sample)
{
	BEGIN(device, WHOLE);
	return take_sample(device, device, sample);
}

EXPORT nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t device, unsigned int gpu_instance, nvmlGpmSample_t sample)
{
	BEGIN(device, WHOLE);
	for (int i = 0; mig_enabled(device) && i < MAX_INSTANCES; i++)
		if (number_or(handle_of(device->device, i), "gpu_instance", UINT_MAX) == gpu_instance)
			return take_sample(device, handle_of(device->device, i), sample);
	return NVML_ERROR_INVALID_ARGUMENT;
}

EXPORT nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *to)
{
	BEGIN(device, WHOLE);
	if (!to)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (to->version != 1)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	to->isSupportedDevice = number_or(device, "gpm_supported", 0);
	return NVML_SUCCESS;
}

static void measure(nvmlDevice_t device, nvmlGpmMetric_t *metric)
{
	char key[32];
	const char *value;

	snprintf(key, sizeof(key), "gpm.%u", metric->metricId);
	value = attribute(device, key);
	metric->value = 0;
	metric->nvmlReturn = value ? error_in(value) : NVML_ERROR_NOT_SUPPORTED;
	if (metric->nvmlReturn == NVML_SUCCESS)
		metric->value = strtod(value, NULL);
}

EXPORT nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *get)
{
	BEGIN(NULL, NO_DEVICE);
	if (!get)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (get->version != 1)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	if (!get->numMetrics || get->numMetrics > sizeof(get->metrics) / sizeof(*get->metrics) || !get->sample1 ||
	    !get->sample2 || !get->sample1->device || get->sample1->device != get->sample2->device ||
	    get->sample1->number >= get->sample2->number)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (unsigned int i = 0; i < get->numMetrics; i++)
		measure(get->sample2->device, &get->metrics[i]);
	return NVML_SUCCESS;
}
#endif

NO_MORE_SLOTS;
