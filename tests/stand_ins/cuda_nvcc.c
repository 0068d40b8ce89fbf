/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What code that nvcc makes calls of the runtime besides, as crt/host_runtime.h of CUDA 13 declares it. The device
 * code that is handed over is not looked at.
 */
#include "cuda_runtime_abi.h"

#include <stdbool.h>

PUBLIC void **__cudaRegisterFatBinary(void *binary)
{
	static void *handle;
	handle = binary;
	return &handle;
}

PUBLIC void __cudaRegisterFatBinaryEnd(void **handle)
{
	(void)handle;
}

PUBLIC void __cudaUnregisterFatBinary(void **handle)
{
	(void)handle;
}

PUBLIC char __cudaInitModule(void **handle)
{
	(void)handle;
	return true;
}

PUBLIC void __cudaRegisterFunction(void **handle, const char *stub, char *function, const char *name, int threads,
				   void *tid, void *bid, dim3 *block, dim3 *grid, int *warp)
{
	(void)handle, (void)stub, (void)function, (void)name, (void)threads, (void)tid, (void)bid, (void)block,
		(void)grid, (void)warp;
}

/* What stands between <<< and >>> is handed over to the stub in this way. */
static _Thread_local struct {
	dim3 grid, block;
	size_t shared;
	cudaStream_t stream;
} configuration;

PUBLIC unsigned int __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream)
{
	configuration.grid = grid;
	configuration.block = block;
	configuration.shared = shared;
	configuration.stream = stream;
	return 0;
}

PUBLIC cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
	*grid = configuration.grid;
	*block = configuration.block;
	*shared = configuration.shared;
	*(cudaStream_t *)stream = configuration.stream;
	return CUDA_SUCCESS;
}
