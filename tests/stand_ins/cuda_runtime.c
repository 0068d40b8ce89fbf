/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stand-in for NVIDIA's libcudart. Each function calls or, where the arguments allow it and with
 * -foptimize-sibling-calls, jumps to the driver's counterpart. STAND_IN_ROUTE says how it gets there: by the
 * driver's exported entries (`exported`, as when nothing is said), past them (`inner`), or not at all (`none`).
 *
 * -DHIDDEN gives its symbols hidden visibility, for libraries that it is linked into.
 */
#include "cuda_runtime_abi.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef HIDDEN
#define HIDE(name) ".hidden " name "\n"
#else
#define HIDE(name) ""
#endif

/* ---- the way to the driver */

static struct driver loaded;
static const struct driver *the_driver; /* NULL: there is none */
static pthread_once_t once = PTHREAD_ONCE_INIT;

typedef CUresult get_address(const char *, void **, int, unsigned long long, int *);
typedef CUresult get_table(const void **, const void *);

/* The driver's address of what the headers call NAME with a suffix. */
static void *find(get_address *get, const char *name)
{
	char bare[64];
	void *address = NULL;
	size_t length = strlen(name);
	int per_thread = length > 5 && !strcmp(name + length - 5, "_ptsz");
	if (per_thread)
		length -= 5;
	if (length > 3 && !memcmp(name + length - 3, "_v2", 3))
		length -= 3;
	snprintf(bare, sizeof(bare), "%.*s", (int)length, name);
	int status = 0;
	unsigned long long flags = per_thread ? CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM : 0;
	if (get(bare, &address, 13000, flags, &status))
		return NULL;
	return address;
}

static void load(void)
{
	const char *route = getenv("STAND_IN_ROUTE");
	if (route && !strcmp(route, "none")) {
		the_driver = &device_functions;
		return;
	}
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	if (!library)
		return;
	if (route && !strcmp(route, "inner")) {
		const void *table = NULL;
		get_table *get = (get_table *)dlsym(library, "cuGetExportTable");
		if (get && !get(&table, NULL))
			the_driver = table;
		return;
	}
	get_address *get = (get_address *)dlsym(library, "cuGetProcAddress_v2");
	if (!get)
		return;
#define FIND(name, ...)                                                                                                \
	loaded.name = find(get, #name);                                                                                \
	if (!loaded.name)                                                                                              \
		return;
	DRIVER_FUNCTIONS(FIND)
	the_driver = &loaded;
}

static inline const struct driver *driver(void)
{
	pthread_once(&once, load);
	return the_driver;
}

#define DRIVER(name, ...) (driver() ? the_driver->name(__VA_ARGS__) : cudaErrorInsufficientDriver)

cudaError_t cudaGetLastError(void)
{
	return driver() ? CUDA_SUCCESS : cudaErrorInsufficientDriver;
}

/* ---- launches */

/*
 * What the driver knows a function by: a handle, from which nobody can tell where the host's stub is. Of a
 * handle it is the handle itself.
 */
static char handles[1 << 16];

static void *handle(const void *func)
{
	size_t place = (size_t)func - (size_t)handles;
	if (!func || place < sizeof(handles))
		return (void *)func;
	return handles + ((size_t)func >> 2) % sizeof(handles);
}

/* Code that nvcc 13 makes asks this once for each kernel, and launches by what it gets. */
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *func)
{
	*kernel = handle(func);
	return driver() ? CUDA_SUCCESS : cudaErrorInsufficientDriver;
}

#define DIM(d) d.x, d.y, d.z

#define LAUNCHES(suffix)                                                                                               \
	cudaError_t cudaLaunchKernel##suffix(const void *func, dim3 grid, dim3 block, void **args, size_t shared,      \
					     cudaStream_t stream)                                                      \
	{                                                                                                              \
		return DRIVER(cuLaunchKernel##suffix, handle(func), DIM(grid), DIM(block), (unsigned int)shared,       \
			      stream, args, NULL);                                                                     \
	}                                                                                                              \
                                                                                                                       \
	cudaError_t cudaLaunchKernelExC##suffix(const cudaLaunchConfig_t *config, const void *func, void **args)       \
	{                                                                                                              \
		CUlaunchConfig same = {                                                                                \
			DIM(config->gridDim), DIM(config->blockDim), (unsigned int)config->dynamicSmemBytes,           \
			config->stream,	      config->attrs,	     config->numAttrs,                                 \
		};                                                                                                     \
		return DRIVER(cuLaunchKernelEx##suffix, &same, handle(func), args, NULL);                              \
	}                                                                                                              \
                                                                                                                       \
	cudaError_t cudaLaunchCooperativeKernel##suffix(const void *func, dim3 grid, dim3 block, void **args,          \
							size_t shared, cudaStream_t stream)                            \
	{                                                                                                              \
		return DRIVER(cuLaunchCooperativeKernel##suffix, handle(func), DIM(grid), DIM(block),                  \
			      (unsigned int)shared, stream, args);                                                     \
	}                                                                                                              \
                                                                                                                       \
	cudaError_t cudaGraphLaunch##suffix(cudaGraphExec_t graph, cudaStream_t stream)                                \
	{                                                                                                              \
		return DRIVER(cuGraphLaunch##suffix, graph, stream);                                                   \
	}

LAUNCHES()
LAUNCHES(_ptsz)

/* In NVIDIA's these are a frame that is undone and a jump, whatever the compiler is told. */
#if defined(__x86_64__)
#define JUMP(to) "\tpush %rbp\n\tmov %rsp, %rbp\n\tpop %rbp\n\tjmp " to "\n"
#elif defined(__aarch64__)
#define JUMP(to) "\tb " to "\n"
#endif
#define WRAPPER(name)                                                                                                  \
	__asm__(".text\n\t.globl __" name "\n" HIDE("__" name) "\t.type __" name ", %function\n\t.p2align 4\n"         \
							       "__" name ":\n" JUMP(name) "\t.size __" name            \
											  ", . - __" name "\n");
WRAPPER("cudaLaunchKernel")
WRAPPER("cudaLaunchKernel_ptsz")

/* ---- copies and sets */

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
	switch (kind) {
	case cudaMemcpyHostToDevice:
		return DRIVER(cuMemcpyHtoD_v2, (CUdeviceptr)to, from, bytes);
	case cudaMemcpyDeviceToHost:
		return DRIVER(cuMemcpyDtoH_v2, to, (CUdeviceptr)from, bytes);
	case cudaMemcpyDeviceToDevice:
		return DRIVER(cuMemcpyDtoD_v2, (CUdeviceptr)to, (CUdeviceptr)from, bytes);
	default:
		return DRIVER(cuMemcpy, (CUdeviceptr)to, (CUdeviceptr)from, bytes);
	}
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
	switch (kind) {
	case cudaMemcpyHostToDevice:
		return DRIVER(cuMemcpyHtoDAsync_v2, (CUdeviceptr)to, from, bytes, stream);
	case cudaMemcpyDeviceToHost:
		return DRIVER(cuMemcpyDtoHAsync_v2, to, (CUdeviceptr)from, bytes, stream);
	case cudaMemcpyDeviceToDevice:
		return DRIVER(cuMemcpyDtoDAsync_v2, (CUdeviceptr)to, (CUdeviceptr)from, bytes, stream);
	default:
		return DRIVER(cuMemcpyAsync, (CUdeviceptr)to, (CUdeviceptr)from, bytes, stream);
	}
}

cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
			 enum cudaMemcpyKind kind)
{
	int to_host = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyHostToHost;
	int from_host = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyHostToHost;
	CUDA_MEMCPY2D copy = {
		.srcMemoryType = from_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE,
		.srcHost = from_host ? from : NULL,
		.srcDevice = from_host ? 0 : (CUdeviceptr)from,
		.srcPitch = from_pitch,
		.dstMemoryType = to_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE,
		.dstHost = to_host ? to : NULL,
		.dstDevice = to_host ? 0 : (CUdeviceptr)to,
		.dstPitch = to_pitch,
		.WidthInBytes = width,
		.Height = height,
	};
	return DRIVER(cuMemcpy2D_v2, &copy);
}

cudaError_t cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t bytes)
{
	(void)to_device, (void)from_device;
	return DRIVER(cuMemcpyPeer, (CUdeviceptr)to, NULL, (CUdeviceptr)from, NULL, bytes);
}

cudaError_t cudaMemset(void *to, int value, size_t bytes)
{
	return DRIVER(cuMemsetD8_v2, (CUdeviceptr)to, (unsigned char)value, bytes);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
	return DRIVER(cuMemsetD8Async, (CUdeviceptr)to, (unsigned char)value, bytes, stream);
}

/* ---- memory: a pointer and a CUdeviceptr are of one size */

cudaError_t cudaMalloc(void **memory, size_t bytes)
{
	return DRIVER(cuMemAlloc_v2, (CUdeviceptr *)memory, bytes);
}

cudaError_t cudaMallocAsync(void **memory, size_t bytes, cudaStream_t stream)
{
	return DRIVER(cuMemAllocAsync, (CUdeviceptr *)memory, bytes, stream);
}

cudaError_t cudaMallocHost(void **memory, size_t bytes)
{
	return DRIVER(cuMemAllocHost_v2, memory, bytes);
}

cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned int flags)
{
	return DRIVER(cuMemHostAlloc, memory, bytes, flags);
}

cudaError_t cudaMallocManaged(void **memory, size_t bytes, unsigned int flags)
{
	return DRIVER(cuMemAllocManaged, (CUdeviceptr *)memory, bytes, flags);
}

cudaError_t cudaFree(void *memory)
{
	return DRIVER(cuMemFree_v2, (CUdeviceptr)memory);
}

cudaError_t cudaFreeAsync(void *memory, cudaStream_t stream)
{
	return DRIVER(cuMemFreeAsync, (CUdeviceptr)memory, stream);
}

cudaError_t cudaFreeHost(void *memory)
{
	return DRIVER(cuMemFreeHost, memory);
}

/* ---- waiting */

cudaError_t cudaDeviceSynchronize(void)
{
	return DRIVER(cuCtxSynchronize);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
	return DRIVER(cuStreamSynchronize, stream);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
	return DRIVER(cuEventSynchronize, event);
}
