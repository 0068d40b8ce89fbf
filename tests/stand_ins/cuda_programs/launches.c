/* SPDX-License-Identifier: Apache-2.0 */
/* Every way to launch a kernel. Where there is a runtime it is called, else the driver. */
#include "counts.h"

#include <stdio.h>
#include <string.h>

static struct CUfunc_st *from_module;

static void *stub(const struct options *options)
{
	return options->kernel < 0 ? (void *)from_module : (void *)kernels[options->kernel].stub;
}

#define DIMENSIONS(of) of[0], of[1], of[2]
#define RUNTIME_LAUNCH (const void *, dim3, dim3, void **, size_t, cudaStream_t)
#define DRIVER_LAUNCH                                                                                                  \
	(CUfunction, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, \
	 CUstream, void **, void **)

static void launch_by_driver(const struct options *o, const char *via)
{
	unsigned int shared = (unsigned int)o->shared;
	const unsigned int *grid = o->grid, *block = o->block;
	if (!strcmp(via, "plain"))
		CALL(0, cuLaunchKernel, DRIVER_LAUNCH, stub(o), DIMENSIONS(grid), DIMENSIONS(block), shared, o->stream,
		     NULL, NULL);
	else if (!strcmp(via, "ptsz"))
		CALL(0, cuLaunchKernel_ptsz, DRIVER_LAUNCH, stub(o), DIMENSIONS(grid), DIMENSIONS(block), shared,
		     o->stream, NULL, NULL);
	else if (!strcmp(via, "cooperative"))
		CALL(0, cuLaunchCooperativeKernel,
		     (CUfunction, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
		      unsigned int, CUstream, void **),
		     stub(o), DIMENSIONS(grid), DIMENSIONS(block), shared, o->stream, NULL);
	else if (!strcmp(via, "ex"))
		CALL(0, cuLaunchKernelEx, (const CUlaunchConfig *, CUfunction, void **, void **),
		     &(CUlaunchConfig){DIMENSIONS(grid), DIMENSIONS(block), shared, o->stream, NULL, 0}, stub(o), NULL,
		     NULL);
	else
		fail("no such way to launch", via);
}

static void launch_by_runtime(const struct options *o, const char *via)
{
	dim3 grid = {DIMENSIONS(o->grid)}, block = {DIMENSIONS(o->block)};
	if (!strcmp(via, "plain")) {
		CALL(0, cudaLaunchKernel, RUNTIME_LAUNCH, stub(o), grid, block, NULL, o->shared, o->stream);
	} else if (!strcmp(via, "ptsz")) {
		CALL(0, cudaLaunchKernel_ptsz, RUNTIME_LAUNCH, stub(o), grid, block, NULL, o->shared, o->stream);
	} else if (!strcmp(via, "wrapper")) {
		CALL(0, __cudaLaunchKernel, RUNTIME_LAUNCH, stub(o), grid, block, NULL, o->shared, o->stream);
	} else if (!strcmp(via, "wrapper_ptsz")) {
		CALL(0, __cudaLaunchKernel_ptsz, RUNTIME_LAUNCH, stub(o), grid, block, NULL, o->shared, o->stream);
	} else if (!strcmp(via, "handle")) {
		static cudaKernel_t handles[KERNELS]; /* asked once for each kernel, as nvcc's code does */
		cudaKernel_t *handle = &handles[o->kernel];
		if (!*handle)
			CALL(0, __cudaGetKernel, (cudaKernel_t *, const void *), handle, stub(o));
		CALL(0, __cudaLaunchKernel, RUNTIME_LAUNCH, *handle, grid, block, NULL, o->shared, o->stream);
	} else if (!strcmp(via, "cooperative")) {
		CALL(0, cudaLaunchCooperativeKernel, RUNTIME_LAUNCH, stub(o), grid, block, NULL, o->shared, o->stream);
	} else if (!strcmp(via, "ex")) {
		CALL(0, cudaLaunchKernelExC, (const cudaLaunchConfig_t *, const void *, void **),
		     &(cudaLaunchConfig_t){grid, block, o->shared, o->stream, NULL, 0}, stub(o), NULL);
	} else {
		fail("no such way to launch", via);
	}
}

void launch(const struct options *options)
{
	bool driver = !strncmp(options->via, "driver:", 7);
	if (driver || options->kernel < 0 || !find("cudaLaunchKernel"))
		launch_by_driver(options, options->via + (driver ? 7 : 0));
	else
		launch_by_runtime(options, options->via);
	count_launch(options->kernel);
}

void graph(const struct options *options)
{
	void *exec = &from_module; /* any handle */
	if (find("cudaGraphLaunch"))
		CALL(0, cudaGraphLaunch, (cudaGraphExec_t, cudaStream_t), exec, options->stream);
	else
		CALL(0, cuGraphLaunch, (CUgraphExec, CUstream), exec, options->stream);
}

void module(const char *name)
{
	CUmodule loaded_module = NULL;
	CALL(0, cuModuleLoadData, (CUmodule *, const void *), &loaded_module, "image");
	CALL(0, cuModuleGetFunction, (CUfunction *, CUmodule, const char *), &from_module, loaded_module, name);
}
