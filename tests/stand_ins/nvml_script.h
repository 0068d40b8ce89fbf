/* SPDX-License-Identifier: Apache-2.0 */
/* The script that the stand-in follows, and what every call of it begins with. The form stands in README.md. */
#pragma once

#include "nvml_abi.h"

#define MAX_DEVICES 64
#define MAX_INSTANCES 8

/* A GPU (instance -1) or one of its MIG instances; a handle points to one of these. */
struct device {
	int device;
	int instance;
};

nvmlDevice_t handle_of(int device, int instance);

/* ---- what the script says; valid while a call is open */

const char *attribute(nvmlDevice_t device, const char *key); /* NULL: nothing */
nvmlReturn_t text(nvmlDevice_t device, const char *key, char *to, unsigned int length);
nvmlReturn_t number(nvmlDevice_t device, const char *key, unsigned long long *to);
nvmlReturn_t small_number(nvmlDevice_t device, const char *key, unsigned int *to);
unsigned long long number_or(nvmlDevice_t device, const char *key, unsigned long long otherwise);
/* The value of `text`: `error N` gives N. */
nvmlReturn_t error_in(const char *text);
unsigned int device_count(void);
int mig_enabled(nvmlDevice_t device);
unsigned long long now_us(void);

/* One that the script tells of: `event.NUMBER TYPE DATA GPU_INSTANCE COMPUTE_INSTANCE`. */
struct event {
	unsigned long long number;
	int device;
	unsigned long long type, data;
	unsigned int gpu_instance, compute_instance;
};
/* The first event after `number` of a device for which wanted(context, event). */
int next_event(unsigned long long number, int (*wanted)(const void *context, const struct event *event),
	       const void *context, struct event *to);
unsigned long long last_event(void);

/* ---- calls */

enum {
	ANY = 0,	  /* any handle will do */
	WHOLE = 1,	  /* NVML refuses it for MIG instances */
	NOT_IN_MIG = 3,	  /* and for GPUs that are cut into instances */
	NO_DEVICE = 4,	  /* the call has no handle */
	BEFORE_INIT = 12, /* likewise, and need not follow nvmlInit */
};

struct call {
	nvmlReturn_t result; /* when it is not NVML_SUCCESS the call is over */
	int open;
};

/* What the script has `function` of `device` fail with. */
nvmlReturn_t failure(const char *function, nvmlDevice_t device);

extern int initialised; /* how often, less the shutdowns */

struct call enter(int slot, const char *name, nvmlDevice_t device, int kind);
void leave(struct call *call);
/* Let others go on for some time, then read the script again. */
void pause_call(unsigned int ms);

/* The first line of every function of the library: counts it and does what the script wants of it. */
#define BEGIN(device, kind)                                                                                            \
	__attribute__((cleanup(leave))) struct call call = enter(SLOTS + __COUNTER__, __func__, device, kind);         \
	if (call.result != NVML_SUCCESS)                                                                               \
	return call.result

/* Each source file has so many functions that are counted. */
#define SLOTS_EACH 80
#define FIRST_SLOT(file) ((file)*SLOTS_EACH)
#define NO_MORE_SLOTS static_assert(__COUNTER__ <= SLOTS_EACH, "SLOTS_EACH is too small")

#define EXPORT __attribute__((visibility("default")))

#define NUMBER(function, key, kind)                                                                                    \
	EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned int *to)                                            \
	{                                                                                                              \
		BEGIN(device, kind);                                                                                   \
		return small_number(device, key, to);                                                                  \
	}                                                                                                              \
	static_assert(1, "")
