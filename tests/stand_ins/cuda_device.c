/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A device made of host memory: its pointers are the host's, copies and sets are done on the spot, and
 * synchronising takes as long as STAND_IN_SYNC_US says.
 */
#include "cuda_device.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

PUBLIC void (*stand_in_inside)(const char *function);

static useconds_t sync_us;

__attribute__((constructor)) static void read_environment(void)
{
	const char *text = getenv("STAND_IN_SYNC_US");
	sync_us = text ? (useconds_t)strtoul(text, NULL, 10) : 0;
}

static void inside(const char *function)
{
	void (*call)(const char *) = __atomic_load_n(&stand_in_inside, __ATOMIC_RELAXED);
	if (call)
		call(function);
}

#define BEGIN inside(__func__ + sizeof("device_") - 1)
#define UNUSED(x) ((void)(x))

/* ---- launches */

CUresult device_cuLaunchKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,
			       unsigned int by, unsigned int bz, unsigned int shared, CUstream stream, void **params,
			       void **extra)
{
	BEGIN;
	UNUSED(shared), UNUSED(stream), UNUSED(params), UNUSED(extra);
	return f && gx && gy && gz && bx && by && bz ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult device_cuLaunchCooperativeKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz,
					  unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared,
					  CUstream stream, void **params)
{
	BEGIN;
	UNUSED(shared), UNUSED(stream), UNUSED(params);
	return f && gx && gy && gz && bx && by && bz ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult device_cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params, void **extra)
{
	BEGIN;
	UNUSED(params), UNUSED(extra);
	return f && config && config->gridDimX && config->blockDimX ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult device_cuGraphLaunch(CUgraphExec graph, CUstream stream)
{
	BEGIN;
	UNUSED(stream);
	return graph ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- copies and sets */

static CUresult copy(void *to, const void *from, size_t bytes)
{
	if (bytes && !(to && from))
		return CUDA_ERROR_INVALID_VALUE;
	if (bytes)
		memmove(to, from, bytes);
	return CUDA_SUCCESS;
}

CUresult device_cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
	BEGIN;
	return copy((void *)to, (const void *)from, bytes);
}

CUresult device_cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
	BEGIN;
	UNUSED(stream);
	return copy((void *)to, (const void *)from, bytes);
}

CUresult device_cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t bytes)
{
	BEGIN;
	return copy((void *)to, from, bytes);
}

CUresult device_cuMemcpyDtoH(void *to, CUdeviceptr from, size_t bytes)
{
	BEGIN;
	return copy(to, (const void *)from, bytes);
}

CUresult device_cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
	BEGIN;
	return copy((void *)to, (const void *)from, bytes);
}

CUresult device_cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream stream)
{
	BEGIN;
	UNUSED(stream);
	return copy((void *)to, from, bytes);
}

CUresult device_cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
	BEGIN;
	UNUSED(stream);
	return copy(to, (const void *)from, bytes);
}

CUresult device_cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
	BEGIN;
	UNUSED(stream);
	return copy((void *)to, (const void *)from, bytes);
}

CUresult device_cuMemcpy2D(const CUDA_MEMCPY2D *copies)
{
	BEGIN;
	if (!copies)
		return CUDA_ERROR_INVALID_VALUE;
	int to_host = copies->dstMemoryType == CU_MEMORYTYPE_HOST;
	int from_host = copies->srcMemoryType == CU_MEMORYTYPE_HOST;
	char *to = to_host ? copies->dstHost : (void *)copies->dstDevice;
	const char *from = from_host ? copies->srcHost : (const void *)copies->srcDevice;
	CUresult result = CUDA_SUCCESS;
	for (size_t row = 0; row < copies->Height && !result; row++)
		result = copy(to + row * copies->dstPitch, from + row * copies->srcPitch, copies->WidthInBytes);
	return result;
}

CUresult device_cuMemcpyPeer(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
			     size_t bytes)
{
	BEGIN;
	UNUSED(to_context), UNUSED(from_context);
	return copy((void *)to, (const void *)from, bytes);
}

#define SETS(name, type)                                                                                               \
	static CUresult set_##type(CUdeviceptr to, unsigned type value, size_t count)                                  \
	{                                                                                                              \
		unsigned type *at = (void *)to;                                                                        \
		if (count && !at)                                                                                      \
			return CUDA_ERROR_INVALID_VALUE;                                                               \
		for (size_t i = 0; i < count; i++)                                                                     \
			at[i] = value;                                                                                 \
		return CUDA_SUCCESS;                                                                                   \
	}                                                                                                              \
                                                                                                                       \
	CUresult device_##name(CUdeviceptr to, unsigned type value, size_t count)                                      \
	{                                                                                                              \
		BEGIN;                                                                                                 \
		return set_##type(to, value, count);                                                                   \
	}                                                                                                              \
                                                                                                                       \
	CUresult device_##name##Async(CUdeviceptr to, unsigned type value, size_t count, CUstream stream)              \
	{                                                                                                              \
		BEGIN;                                                                                                 \
		UNUSED(stream);                                                                                        \
		return set_##type(to, value, count);                                                                   \
	}

SETS(cuMemsetD8, char)
SETS(cuMemsetD16, short)
SETS(cuMemsetD32, int)

/* ---- memory */

static CUresult allocate(void **memory, size_t bytes)
{
	if (!memory || !bytes)
		return CUDA_ERROR_INVALID_VALUE;
	*memory = malloc(bytes);
	return *memory ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult allocate_on_device(unsigned long long *memory, size_t bytes)
{
	void *place = NULL;
	CUresult result = memory ? allocate(&place, bytes) : CUDA_ERROR_INVALID_VALUE;
	if (!result)
		*memory = (unsigned long long)place;
	return result;
}

static CUresult release(unsigned long long memory)
{
	free((void *)memory);
	return CUDA_SUCCESS;
}

CUresult device_cuMemAlloc(CUdeviceptr *memory, size_t bytes)
{
	BEGIN;
	return allocate_on_device(memory, bytes);
}

CUresult device_cuMemAllocManaged(CUdeviceptr *memory, size_t bytes, unsigned int flags)
{
	BEGIN;
	UNUSED(flags);
	return allocate_on_device(memory, bytes);
}

CUresult device_cuMemAllocAsync(CUdeviceptr *memory, size_t bytes, CUstream stream)
{
	BEGIN;
	UNUSED(stream);
	return allocate_on_device(memory, bytes);
}

CUresult device_cuMemHostAlloc(void **memory, size_t bytes, unsigned int flags)
{
	BEGIN;
	UNUSED(flags);
	return allocate(memory, bytes);
}

CUresult device_cuMemAllocHost(void **memory, size_t bytes)
{
	BEGIN;
	return allocate(memory, bytes);
}

CUresult device_cuMemCreate(CUmemGenericAllocationHandle *memory, size_t bytes, const CUmemAllocationProp *properties,
			    unsigned long long flags)
{
	BEGIN;
	UNUSED(properties), UNUSED(flags);
	return allocate_on_device(memory, bytes);
}

CUresult device_cuMemFree(CUdeviceptr memory)
{
	BEGIN;
	return release(memory);
}

CUresult device_cuMemFreeAsync(CUdeviceptr memory, CUstream stream)
{
	BEGIN;
	UNUSED(stream);
	return release(memory);
}

CUresult device_cuMemFreeHost(void *memory)
{
	BEGIN;
	return release((unsigned long long)memory);
}

CUresult device_cuMemRelease(CUmemGenericAllocationHandle memory)
{
	BEGIN;
	return release(memory);
}

/* ---- waiting */

static CUresult synchronize(void)
{
	struct timespec left = {sync_us / 1000000, sync_us % 1000000 * 1000L};
	while (sync_us && nanosleep(&left, &left))
		;
	return CUDA_SUCCESS;
}

CUresult device_cuStreamSynchronize(CUstream stream)
{
	BEGIN;
	UNUSED(stream);
	return synchronize();
}

CUresult device_cuEventSynchronize(CUevent event)
{
	BEGIN;
	UNUSED(event);
	return synchronize();
}

CUresult device_cuCtxSynchronize(void)
{
	BEGIN;
	return synchronize();
}

/* ---- modules; what is named is never freed, as a process has few of them */

CUresult device_cuModuleLoadData(CUmodule *module, const void *image)
{
	BEGIN;
	UNUSED(image);
	return allocate((void **)module, 64);
}

static CUresult named(void **handle, const char *name)
{
	if (!handle || !name)
		return CUDA_ERROR_INVALID_VALUE;
	*handle = strdup(name);
	return *handle ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult device_cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name)
{
	BEGIN;
	UNUSED(module);
	return named((void **)f, name);
}

CUresult device_cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
	BEGIN;
	UNUSED(library);
	return named((void **)kernel, name);
}

#define FUNCTION(name, inner, ...) .name = device_##inner,
const struct driver device_functions = {DRIVER_FUNCTIONS(FUNCTION)};
