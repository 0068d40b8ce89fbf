/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What of CUDA's ABI the stand-ins have, as CUDA 13 declares it in cuda.h, cuda_runtime_api.h and
 * crt/device_functions.h.
 */
#pragma once

#include <stddef.h>

/* Types are NVIDIA's where cuda.h was included before, which a test does to compare the prototypes. */
#ifndef CUDA_VERSION

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUlib_st *CUlibrary;
typedef struct CUkern_st *CUkernel;
typedef struct CUgraphExec_st *CUgraphExec;
typedef struct CUarray_st *CUarray;
typedef struct CUmemAllocationProp_st CUmemAllocationProp;

enum {
	CUDA_SUCCESS = 0,
	CUDA_ERROR_INVALID_VALUE = 1,
	CUDA_ERROR_OUT_OF_MEMORY = 2,
	CUDA_ERROR_NOT_FOUND = 500,
};

typedef struct {
	unsigned int gridDimX, gridDimY, gridDimZ;
	unsigned int blockDimX, blockDimY, blockDimZ;
	unsigned int sharedMemBytes;
	CUstream hStream;
	void *attrs;
	unsigned int numAttrs;
} CUlaunchConfig;

typedef struct {
	size_t srcXInBytes, srcY;
	int srcMemoryType;
	const void *srcHost;
	CUdeviceptr srcDevice;
	CUarray srcArray;
	size_t srcPitch;
	size_t dstXInBytes, dstY;
	int dstMemoryType;
	void *dstHost;
	CUdeviceptr dstDevice;
	CUarray dstArray;
	size_t dstPitch;
	size_t WidthInBytes, Height;
} CUDA_MEMCPY2D;

enum { CU_MEMORYTYPE_HOST = 1, CU_MEMORYTYPE_DEVICE = 2 };
enum { CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM = 2 };

#endif

/*
 * The driver's functions that do something on a device: F(exported, what does its work, parameters, arguments).
 */
#define LAUNCH                                                                                                         \
	(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,            \
	 unsigned int bz, unsigned int shared, CUstream stream, void **params, void **extra),                          \
		(f, gx, gy, gz, bx, by, bz, shared, stream, params, extra)
#define LAUNCH_COOPERATIVE                                                                                             \
	(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,            \
	 unsigned int bz, unsigned int shared, CUstream stream, void **params),                                        \
		(f, gx, gy, gz, bx, by, bz, shared, stream, params)
#define LAUNCH_EX (const CUlaunchConfig *config, CUfunction f, void **params, void **extra), (config, f, params, extra)
#define GRAPH_LAUNCH (CUgraphExec graph, CUstream stream), (graph, stream)
#define COPY (CUdeviceptr to, CUdeviceptr from, size_t bytes), (to, from, bytes)
#define COPY_IN (CUdeviceptr to, const void *from, size_t bytes), (to, from, bytes)
#define COPY_OUT (void *to, CUdeviceptr from, size_t bytes), (to, from, bytes)
#define COPY_ASYNC (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), (to, from, bytes, stream)
#define COPY_IN_ASYNC (CUdeviceptr to, const void *from, size_t bytes, CUstream stream), (to, from, bytes, stream)
#define COPY_OUT_ASYNC (void *to, CUdeviceptr from, size_t bytes, CUstream stream), (to, from, bytes, stream)
#define COPY_PEER                                                                                                      \
	(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes),                \
		(to, to_context, from, from_context, bytes)
#define SET(type) (CUdeviceptr to, type value, size_t count), (to, value, count)
#define SET_ASYNC(type) (CUdeviceptr to, type value, size_t count, CUstream stream), (to, value, count, stream)

#define DRIVER_FUNCTIONS(F)                                                                                            \
	F(cuLaunchKernel, cuLaunchKernel, LAUNCH)                                                                      \
	F(cuLaunchKernel_ptsz, cuLaunchKernel, LAUNCH)                                                                 \
	F(cuLaunchKernelEx, cuLaunchKernelEx, LAUNCH_EX)                                                               \
	F(cuLaunchKernelEx_ptsz, cuLaunchKernelEx, LAUNCH_EX)                                                          \
	F(cuLaunchCooperativeKernel, cuLaunchCooperativeKernel, LAUNCH_COOPERATIVE)                                    \
	F(cuLaunchCooperativeKernel_ptsz, cuLaunchCooperativeKernel, LAUNCH_COOPERATIVE)                               \
	F(cuGraphLaunch, cuGraphLaunch, GRAPH_LAUNCH)                                                                  \
	F(cuGraphLaunch_ptsz, cuGraphLaunch, GRAPH_LAUNCH)                                                             \
	F(cuMemcpy, cuMemcpy, COPY)                                                                                    \
	F(cuMemcpyAsync, cuMemcpyAsync, COPY_ASYNC)                                                                    \
	F(cuMemcpyHtoD_v2, cuMemcpyHtoD, COPY_IN)                                                                      \
	F(cuMemcpyDtoH_v2, cuMemcpyDtoH, COPY_OUT)                                                                     \
	F(cuMemcpyDtoD_v2, cuMemcpyDtoD, COPY)                                                                         \
	F(cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync, COPY_IN_ASYNC)                                                      \
	F(cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync, COPY_OUT_ASYNC)                                                     \
	F(cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync, COPY_ASYNC)                                                         \
	F(cuMemcpy2D_v2, cuMemcpy2D, (const CUDA_MEMCPY2D *copy), (copy))                                              \
	F(cuMemcpyPeer, cuMemcpyPeer, COPY_PEER)                                                                       \
	F(cuMemsetD8_v2, cuMemsetD8, SET(unsigned char))                                                               \
	F(cuMemsetD16_v2, cuMemsetD16, SET(unsigned short))                                                            \
	F(cuMemsetD32_v2, cuMemsetD32, SET(unsigned int))                                                              \
	F(cuMemsetD8Async, cuMemsetD8Async, SET_ASYNC(unsigned char))                                                  \
	F(cuMemsetD16Async, cuMemsetD16Async, SET_ASYNC(unsigned short))                                               \
	F(cuMemsetD32Async, cuMemsetD32Async, SET_ASYNC(unsigned int))                                                 \
	F(cuMemAlloc_v2, cuMemAlloc, (CUdeviceptr * memory, size_t bytes), (memory, bytes))                            \
	F(cuMemAllocManaged, cuMemAllocManaged, (CUdeviceptr * memory, size_t bytes, unsigned int flags),              \
	  (memory, bytes, flags))                                                                                      \
	F(cuMemAllocAsync, cuMemAllocAsync, (CUdeviceptr * memory, size_t bytes, CUstream stream),                     \
	  (memory, bytes, stream))                                                                                     \
	F(cuMemHostAlloc, cuMemHostAlloc, (void **memory, size_t bytes, unsigned int flags), (memory, bytes, flags))   \
	F(cuMemAllocHost_v2, cuMemAllocHost, (void **memory, size_t bytes), (memory, bytes))                           \
	F(cuMemCreate, cuMemCreate,                                                                                    \
	  (CUmemGenericAllocationHandle * memory, size_t bytes, const CUmemAllocationProp *properties,                 \
	   unsigned long long flags),                                                                                  \
	  (memory, bytes, properties, flags))                                                                          \
	F(cuMemFree_v2, cuMemFree, (CUdeviceptr memory), (memory))                                                     \
	F(cuMemFreeAsync, cuMemFreeAsync, (CUdeviceptr memory, CUstream stream), (memory, stream))                     \
	F(cuMemFreeHost, cuMemFreeHost, (void *memory), (memory))                                                      \
	F(cuMemRelease, cuMemRelease, (CUmemGenericAllocationHandle memory), (memory))                                 \
	F(cuStreamSynchronize, cuStreamSynchronize, (CUstream stream), (stream))                                       \
	F(cuStreamSynchronize_ptsz, cuStreamSynchronize, (CUstream stream), (stream))                                  \
	F(cuEventSynchronize, cuEventSynchronize, (CUevent event), (event))                                            \
	F(cuCtxSynchronize, cuCtxSynchronize, (void), ())                                                              \
	F(cuModuleLoadData, cuModuleLoadData, (CUmodule * module, const void *image), (module, image))                 \
	F(cuModuleGetFunction, cuModuleGetFunction, (CUfunction * f, CUmodule module, const char *name),               \
	  (f, module, name))                                                                                           \
	F(cuLibraryGetKernel, cuLibraryGetKernel, (CUkernel * kernel, CUlibrary library, const char *name),            \
	  (kernel, library, name))

/* All of them as pointers. */
#define POINTER(name, inner, ...) POINTER_(name, __VA_ARGS__)
#define POINTER_(name, parameters, arguments) CUresult(*name) parameters;
struct driver {
	DRIVER_FUNCTIONS(POINTER)
};
