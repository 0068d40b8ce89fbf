/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stand-in for NVIDIA's libcuda.so.1. Every entry counts its calls, and calls or, with
 * -foptimize-sibling-calls, jumps to what does the work (cuda_device.c). A runtime reaches either: the entries by
 * cuGetProcAddress, what is behind them by cuGetExportTable.
 */
#include "cuda_device.h"

#include <stdio.h>
#include <string.h>

enum function {
#define NUMBER(name, ...) NUMBER_##name,
	DRIVER_FUNCTIONS(NUMBER) FUNCTIONS
};

static unsigned long calls[FUNCTIONS];

#define ENTRY(name, inner, ...) ENTRY_(name, inner, __VA_ARGS__)
/* An entry begins with a frame, as NVIDIA's do. It could begin with the count's lock prefix, and not be probed. */
#define ENTRY_(name, inner, parameters, arguments)                                                                     \
	EXPORT CUresult name parameters;                                                                               \
	CUresult name parameters                                                                                       \
	{                                                                                                              \
		__asm__ volatile("" : : "r"(__builtin_frame_address(0)) : "memory");                                   \
		__atomic_fetch_add(&calls[NUMBER_##name], 1, __ATOMIC_RELAXED);                                        \
		return device_##inner arguments;                                                                       \
	}
DRIVER_FUNCTIONS(ENTRY)

/* ---- what is no work */

EXPORT CUresult cuInit(unsigned int flags)
{
	return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORT CUresult cuDriverGetVersion(int *version)
{
	*version = 13000;
	return CUDA_SUCCESS;
}

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **address, int version, unsigned long long flags,
				    int *status);
EXPORT CUresult cuGetProcAddress(const char *symbol, void **address, int version, unsigned long long flags);

static const struct {
	const char *name;
	void *address;
} entries[] = {
#define NAMED(name, ...) {#name, (void *)name},
	DRIVER_FUNCTIONS(NAMED) NAMED(cuInit) NAMED(cuDriverGetVersion) NAMED(cuGetProcAddress_v2)};

static void *entry(const char *name, const char *suffix)
{
	char wanted[64];
	if (snprintf(wanted, sizeof(wanted), "%s%s", name, suffix) >= (int)sizeof(wanted))
		return NULL;
	for (size_t i = 0; i < sizeof(entries) / sizeof(*entries); i++)
		if (!strcmp(entries[i].name, wanted))
			return entries[i].address;
	return NULL;
}

/* Names are without the suffixes that the headers add. */
CUresult cuGetProcAddress_v2(const char *symbol, void **address, int version, unsigned long long flags, int *status)
{
	(void)version;
	*address = flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM ? entry(symbol, "_ptsz") : NULL;
	if (!*address)
		*address = entry(symbol, "_v2");
	if (!*address)
		*address = entry(symbol, "");
	if (status)
		*status = *address ? 0 : 1;
	return *address ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuGetProcAddress(const char *symbol, void **address, int version, unsigned long long flags)
{
	return cuGetProcAddress_v2(symbol, address, version, flags, NULL);
}

EXPORT CUresult cuGetExportTable(const void **table, const void *id)
{
	(void)id;
	*table = &device_functions;
	return CUDA_SUCCESS;
}

/* How often an exported entry was called, as no part of the real one. */
EXPORT unsigned long stand_in_calls(const char *name)
{
	for (int i = 0; i < FUNCTIONS; i++)
		if (!strcmp(entries[i].name, name))
			return __atomic_load_n(&calls[i], __ATOMIC_RELAXED);
	return 0;
}

/* As if none had been called. */
EXPORT void stand_in_forget(void)
{
	memset(calls, 0, sizeof(calls));
}
