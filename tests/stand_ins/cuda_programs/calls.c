/* SPDX-License-Identifier: Apache-2.0 */
/*
 * -DLINKED_RUNTIME: the runtime's functions are linked; -DLINKED_DRIVER: the driver's. What is not linked is taken
 * out of a library that the script has loaded. Where there is a runtime it is called, else the driver.
 */
#include "counts.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void fail(const char *what, const char *detail)
{
	fprintf(stderr, "launcher: %s: %s\n", what, detail);
	_exit(3);
}

/* ---- counts */

static struct count {
	const char *name;
	unsigned long calls, bytes;
} counts[64];
static unsigned long launches, errors, launched[KERNELS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void count(const char *name, unsigned long bytes, int result)
{
	pthread_mutex_lock(&lock);
	struct count *entry = counts;
	while (entry->name && strcmp(entry->name, name))
		entry++;
	entry->name = name;
	entry->calls++;
	entry->bytes += bytes;
	errors += result != 0;
	pthread_mutex_unlock(&lock);
}

void count_launch(int kernel)
{
	pthread_mutex_lock(&lock);
	launches++;
	if (kernel >= 0)
		launched[kernel]++;
	pthread_mutex_unlock(&lock);
}

static void *of_driver(const char *name)
{
	void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
	return driver ? dlsym(driver, name) : NULL;
}

void forget(void)
{
	void (*forget_driver)(void) = of_driver("stand_in_forget");
	if (forget_driver)
		forget_driver();
	memset(counts, 0, sizeof(counts));
	memset(launched, 0, sizeof(launched));
	launches = errors = 0;
}

static void print_driver(void)
{
	unsigned long (*calls)(const char *) = of_driver("stand_in_calls");
	const char *comma = "";
	if (!calls)
		return;
	printf(", \"driver\": {");
#define PRINT(name, ...)                                                                                               \
	if (calls(#name))                                                                                              \
		printf("%s\"" #name "\": %lu", comma, calls(#name)), comma = ", ";
	DRIVER_FUNCTIONS(PRINT)
	printf("}");
}

void report(void)
{
	printf("{\"pid\": %d, \"launches\": %lu, \"errors\": %lu, \"calls\": {", getpid(), launches, errors);
	for (struct count *entry = counts; entry->name; entry++)
		printf("%s\"%s\": %lu", entry == counts ? "" : ", ", entry->name, entry->calls);
	printf("}, \"bytes\": {");
	const char *comma = "";
	for (struct count *entry = counts; entry->name; entry++)
		if (entry->bytes)
			printf("%s\"%s\": %lu", comma, entry->name, entry->bytes), comma = ", ";
	printf("}, \"kernels\": {");
	comma = "";
	for (int i = 0; i < KERNELS; i++)
		if (launched[i])
			printf("%s\"%s\": %lu", comma, kernels[i].name, launched[i]), comma = ", ";
	printf("}");
	print_driver();
	printf("}\n");
	fflush(stdout);
}

/* ---- where functions are */

#ifdef LINKED_RUNTIME
#define LINKED(F)                                                                                                      \
	F(cudaLaunchKernel)                                                                                            \
	F(cudaLaunchKernel_ptsz)                                                                                       \
	F(__cudaLaunchKernel)                                                                                          \
	F(__cudaLaunchKernel_ptsz)                                                                                     \
	F(__cudaGetKernel)                                                                                             \
	F(cudaLaunchKernelExC)                                                                                         \
	F(cudaLaunchCooperativeKernel)                                                                                 \
	F(cudaGraphLaunch)                                                                                             \
	F(cudaGraphLaunch_ptsz)                                                                                        \
	F(cudaMemcpy)                                                                                                  \
	F(cudaMemcpyAsync)                                                                                             \
	F(cudaMemcpy2D)                                                                                                \
	F(cudaMemcpyPeer)                                                                                              \
	F(cudaMemset)                                                                                                  \
	F(cudaMemsetAsync)                                                                                             \
	F(cudaMalloc)                                                                                                  \
	F(cudaMallocAsync)                                                                                             \
	F(cudaMallocHost)                                                                                              \
	F(cudaHostAlloc)                                                                                               \
	F(cudaMallocManaged)                                                                                           \
	F(cudaFree)                                                                                                    \
	F(cudaFreeAsync)                                                                                               \
	F(cudaFreeHost)                                                                                                \
	F(cudaDeviceSynchronize)                                                                                       \
	F(cudaStreamSynchronize)                                                                                       \
	F(cudaEventSynchronize)
#elif defined(LINKED_DRIVER)
#define PROTOTYPE(name, inner, ...) PROTOTYPE_(name, __VA_ARGS__)
#define PROTOTYPE_(name, parameters, arguments) CUresult name parameters;
DRIVER_FUNCTIONS(PROTOTYPE)
#define LINKED(F) DRIVER_FUNCTIONS(F)
#else
#define LINKED(F)
#endif

static const struct {
	const char *name;
	void *address;
} linked[] = {
#define ENTRY(name, ...) {#name, (void *)name},
	LINKED(ENTRY){NULL, NULL},
};
static void *loaded;

void load(const char *path)
{
	loaded = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
	if (!loaded)
		fail("dlopen", dlerror());
}

void unload(void)
{
	if (loaded)
		dlclose(loaded);
	loaded = NULL;
}

void *find(const char *name)
{
	for (int i = 0; linked[i].name; i++)
		if (!strcmp(linked[i].name, name))
			return linked[i].address;
	return loaded ? dlsym(loaded, name) : NULL;
}

void *need(const char *name)
{
	void *address = find(name);
	if (!address)
		fail("no such function", name);
	return address;
}
