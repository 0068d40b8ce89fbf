/* SPDX-License-Identifier: Apache-2.0 */
/* The runtime's functions that the stand-in has, as CUDA 13 declares them. */
#pragma once

#include "cuda_device.h"

/* Types are NVIDIA's where cuda_runtime_api.h was included before. */
#ifndef CUDART_VERSION

typedef int cudaError_t;
typedef CUstream cudaStream_t;
typedef CUevent cudaEvent_t;
typedef CUgraphExec cudaGraphExec_t;
typedef CUkernel cudaKernel_t;

enum { cudaErrorInsufficientDriver = 35 };
enum cudaMemcpyKind {
	cudaMemcpyHostToHost = 0,
	cudaMemcpyHostToDevice = 1,
	cudaMemcpyDeviceToHost = 2,
	cudaMemcpyDeviceToDevice = 3,
	cudaMemcpyDefault = 4,
};

typedef struct {
	unsigned int x, y, z;
} dim3;

typedef struct {
	dim3 gridDim, blockDim;
	size_t dynamicSmemBytes;
	cudaStream_t stream;
	void *attrs;
	unsigned int numAttrs;
} cudaLaunchConfig_t;

#endif

#define RUNTIME PUBLIC cudaError_t

RUNTIME cudaLaunchKernel(const void *func, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream);
RUNTIME cudaLaunchKernel_ptsz(const void *func, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream);
RUNTIME __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream);
RUNTIME __cudaLaunchKernel_ptsz(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared,
				cudaStream_t stream);
RUNTIME __cudaGetKernel(cudaKernel_t *kernel, const void *func);
RUNTIME cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *func, void **args);
RUNTIME cudaLaunchKernelExC_ptsz(const cudaLaunchConfig_t *config, const void *func, void **args);
RUNTIME cudaLaunchCooperativeKernel(const void *func, dim3 grid, dim3 block, void **args, size_t shared,
				    cudaStream_t stream);
RUNTIME cudaLaunchCooperativeKernel_ptsz(const void *func, dim3 grid, dim3 block, void **args, size_t shared,
					 cudaStream_t stream);
RUNTIME cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream);
RUNTIME cudaGraphLaunch_ptsz(cudaGraphExec_t graph, cudaStream_t stream);
RUNTIME cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind);
RUNTIME cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream);
RUNTIME cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
		     enum cudaMemcpyKind kind);
RUNTIME cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t bytes);
RUNTIME cudaMemset(void *to, int value, size_t bytes);
RUNTIME cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream);
RUNTIME cudaMalloc(void **memory, size_t bytes);
RUNTIME cudaMallocAsync(void **memory, size_t bytes, cudaStream_t stream);
RUNTIME cudaMallocHost(void **memory, size_t bytes);
RUNTIME cudaHostAlloc(void **memory, size_t bytes, unsigned int flags);
RUNTIME cudaMallocManaged(void **memory, size_t bytes, unsigned int flags);
RUNTIME cudaFree(void *memory);
RUNTIME cudaFreeAsync(void *memory, cudaStream_t stream);
RUNTIME cudaFreeHost(void *memory);
RUNTIME cudaDeviceSynchronize(void);
RUNTIME cudaStreamSynchronize(cudaStream_t stream);
RUNTIME cudaEventSynchronize(cudaEvent_t event);
RUNTIME cudaGetLastError(void);
