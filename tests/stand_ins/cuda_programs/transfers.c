/* SPDX-License-Identifier: Apache-2.0 */
/* Copies, sets, memory, waiting and collectives. Where there is a runtime it is called, else the driver. */
#include "counts.h"

#include <stdlib.h>
#include <string.h>

/* Host memory, which is the stand-in's device memory as well. */
static void *buffer(size_t bytes)
{
	static _Thread_local void *memory;
	static _Thread_local size_t size;
	if (size < bytes) {
		free(memory);
		memory = calloc(1, bytes);
		size = bytes;
	}
	if (!memory)
		fail("calloc", "no memory");
	return memory;
}

static enum cudaMemcpyKind kind_of(const char *text)
{
	static const char *const kinds[] = {"h2h", "h2d", "d2h", "d2d", "default"};
	for (int i = 0; i < 5; i++)
		if (!strcmp(text, kinds[i]))
			return (enum cudaMemcpyKind)i;
	fail("no such kind of copy", text);
	return cudaMemcpyDefault;
}

static void copy_by_driver(const struct options *o, enum cudaMemcpyKind kind, void *to, void *from)
{
	CUdeviceptr d_to = (CUdeviceptr)to, d_from = (CUdeviceptr)from;
	size_t n = o->bytes;
	if (o->async && kind == cudaMemcpyHostToDevice)
		CALL(n, cuMemcpyHtoDAsync_v2, (CUdeviceptr, const void *, size_t, CUstream), d_to, from, n, o->stream);
	else if (o->async && kind == cudaMemcpyDeviceToHost)
		CALL(n, cuMemcpyDtoHAsync_v2, (void *, CUdeviceptr, size_t, CUstream), to, d_from, n, o->stream);
	else if (o->async && kind == cudaMemcpyDeviceToDevice)
		CALL(n, cuMemcpyDtoDAsync_v2, (CUdeviceptr, CUdeviceptr, size_t, CUstream), d_to, d_from, n, o->stream);
	else if (o->async)
		CALL(n, cuMemcpyAsync, (CUdeviceptr, CUdeviceptr, size_t, CUstream), d_to, d_from, n, o->stream);
	else if (kind == cudaMemcpyHostToDevice)
		CALL(n, cuMemcpyHtoD_v2, (CUdeviceptr, const void *, size_t), d_to, from, n);
	else if (kind == cudaMemcpyDeviceToHost)
		CALL(n, cuMemcpyDtoH_v2, (void *, CUdeviceptr, size_t), to, d_from, n);
	else if (kind == cudaMemcpyDeviceToDevice)
		CALL(n, cuMemcpyDtoD_v2, (CUdeviceptr, CUdeviceptr, size_t), d_to, d_from, n);
	else
		CALL(n, cuMemcpy, (CUdeviceptr, CUdeviceptr, size_t), d_to, d_from, n);
}

void copy(const struct options *o)
{
	enum cudaMemcpyKind kind = kind_of(o->kind);
	size_t n = o->bytes;
	char *to = buffer(2 * n), *from = to + n;
	if (!find("cudaMemcpy"))
		copy_by_driver(o, kind, to, from);
	else if (o->async)
		CALL(n, cudaMemcpyAsync, (void *, const void *, size_t, enum cudaMemcpyKind, cudaStream_t), to, from, n,
		     kind, o->stream);
	else
		CALL(n, cudaMemcpy, (void *, const void *, size_t, enum cudaMemcpyKind), to, from, n, kind);
}

void copy_rows(const struct options *o)
{
	size_t n = o->bytes * o->rows;
	char *to = buffer(2 * n), *from = to + n;
	enum cudaMemcpyKind kind = kind_of(o->kind);
	if (find("cudaMemcpy2D")) {
		CALL(n, cudaMemcpy2D, (void *, size_t, const void *, size_t, size_t, size_t, enum cudaMemcpyKind), to,
		     o->bytes, from, o->bytes, o->bytes, o->rows, kind);
		return;
	}
	CUDA_MEMCPY2D rows = {
		.srcMemoryType = CU_MEMORYTYPE_HOST,
		.srcHost = from,
		.srcPitch = o->bytes,
		.dstMemoryType = CU_MEMORYTYPE_DEVICE,
		.dstDevice = (CUdeviceptr)to,
		.dstPitch = o->bytes,
		.WidthInBytes = o->bytes,
		.Height = o->rows,
	};
	CALL(n, cuMemcpy2D_v2, (const CUDA_MEMCPY2D *), &rows);
}

void copy_peer(const struct options *o)
{
	size_t n = o->bytes;
	char *to = buffer(2 * n), *from = to + n;
	if (find("cudaMemcpyPeer"))
		CALL(n, cudaMemcpyPeer, (void *, int, const void *, int, size_t), to, 1, from, 0, n);
	else
		CALL(n, cuMemcpyPeer, (CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, size_t), (CUdeviceptr)to, NULL,
		     (CUdeviceptr)from, NULL, n);
}

void set(const struct options *o)
{
	void *to = buffer(o->bytes);
	bool runtime = find("cudaMemset");
	if (runtime && o->async)
		CALL(o->bytes, cudaMemsetAsync, (void *, int, size_t, cudaStream_t), to, 0, o->bytes, o->stream);
	else if (runtime)
		CALL(o->bytes, cudaMemset, (void *, int, size_t), to, 0, o->bytes);
	else if (o->async)
		CALL(o->bytes, cuMemsetD32Async, (CUdeviceptr, unsigned int, size_t, CUstream), (CUdeviceptr)to, 0,
		     o->bytes / 4, o->stream);
	else
		CALL(o->bytes, cuMemsetD32_v2, (CUdeviceptr, unsigned int, size_t), (CUdeviceptr)to, 0, o->bytes / 4);
}

static void allocate_by_driver(const struct options *o, const char *how)
{
	CUdeviceptr memory = 0;
	size_t n = o->bytes;
	if (!strcmp(how, "device")) {
		CALL(n, cuMemAlloc_v2, (CUdeviceptr *, size_t), &memory, n);
		CALL(0, cuMemFree_v2, (CUdeviceptr), memory);
	} else if (!strcmp(how, "managed")) {
		CALL(n, cuMemAllocManaged, (CUdeviceptr *, size_t, unsigned int), &memory, n, 1);
		CALL(0, cuMemFree_v2, (CUdeviceptr), memory);
	} else if (!strcmp(how, "async")) {
		CALL(n, cuMemAllocAsync, (CUdeviceptr *, size_t, CUstream), &memory, n, o->stream);
		CALL(0, cuMemFreeAsync, (CUdeviceptr, CUstream), memory, o->stream);
	} else if (!strcmp(how, "pinned")) {
		CALL(n, cuMemAllocHost_v2, (void **, size_t), (void **)&memory, n);
		CALL(0, cuMemFreeHost, (void *), (void *)memory);
	} else if (!strcmp(how, "host")) {
		CALL(n, cuMemHostAlloc, (void **, size_t, unsigned int), (void **)&memory, n, 0);
		CALL(0, cuMemFreeHost, (void *), (void *)memory);
	} else if (!strcmp(how, "create")) {
		CALL(n, cuMemCreate,
		     (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long), &memory,
		     n, NULL, 0);
		CALL(0, cuMemRelease, (CUmemGenericAllocationHandle), memory);
	} else {
		fail("no such memory", how);
	}
}

void allocate(const struct options *o)
{
	void *memory = NULL;
	size_t n = o->bytes;
	if (!find("cudaMalloc")) {
		allocate_by_driver(o, o->how);
	} else if (!strcmp(o->how, "device")) {
		CALL(n, cudaMalloc, (void **, size_t), &memory, n);
		CALL(0, cudaFree, (void *), memory);
	} else if (!strcmp(o->how, "managed")) {
		CALL(n, cudaMallocManaged, (void **, size_t, unsigned int), &memory, n, 1);
		CALL(0, cudaFree, (void *), memory);
	} else if (!strcmp(o->how, "async")) {
		CALL(n, cudaMallocAsync, (void **, size_t, cudaStream_t), &memory, n, o->stream);
		CALL(0, cudaFreeAsync, (void *, cudaStream_t), memory, o->stream);
	} else if (!strcmp(o->how, "pinned")) {
		CALL(n, cudaMallocHost, (void **, size_t), &memory, n);
		CALL(0, cudaFreeHost, (void *), memory);
	} else if (!strcmp(o->how, "host")) {
		CALL(n, cudaHostAlloc, (void **, size_t, unsigned int), &memory, n, 0);
		CALL(0, cudaFreeHost, (void *), memory);
	} else {
		fail("no such memory", o->how);
	}
}

void synchronize(const struct options *o)
{
	bool runtime = find("cudaDeviceSynchronize");
	void *event = (void *)kernels; /* any handle */
	if (!strcmp(o->how, "stream")) {
		if (runtime)
			CALL(0, cudaStreamSynchronize, (cudaStream_t), o->stream);
		else
			CALL(0, cuStreamSynchronize, (CUstream), o->stream);
	} else if (!strcmp(o->how, "event")) {
		if (runtime)
			CALL(0, cudaEventSynchronize, (cudaEvent_t), event);
		else
			CALL(0, cuEventSynchronize, (CUevent), event);
	} else if (runtime) {
		CALL(0, cudaDeviceSynchronize, (void));
	} else {
		CALL(0, cuCtxSynchronize, (void));
	}
}

/* ---- NCCL, out of a library that the script has loaded */

void collective(const struct options *o)
{
	static void *comm;
	size_t n = o->bytes; /* how many elements */
	void *from = buffer(64), *to = from;
	int (*start)(int **, int, const int *) = need("ncclCommInitAll");
	if (!comm)
		start((int **)&comm, 1, NULL);
	if (!strcmp(o->kind, "all_reduce"))
		CALL(0, ncclAllReduce, (const void *, void *, size_t, int, int, void *, void *), from, to, n,
		     (int)o->type, 0, comm, o->stream);
	else if (!strcmp(o->kind, "reduce_scatter"))
		CALL(0, ncclReduceScatter, (const void *, void *, size_t, int, int, void *, void *), from, to, n,
		     (int)o->type, 0, comm, o->stream);
	else if (!strcmp(o->kind, "all_gather"))
		CALL(0, ncclAllGather, (const void *, void *, size_t, int, void *, void *), from, to, n, (int)o->type,
		     comm, o->stream);
	else if (!strcmp(o->kind, "reduce"))
		CALL(0, ncclReduce, (const void *, void *, size_t, int, int, int, void *, void *), from, to, n,
		     (int)o->type, 0, 0, comm, o->stream);
	else if (!strcmp(o->kind, "broadcast"))
		CALL(0, ncclBroadcast, (const void *, void *, size_t, int, int, void *, void *), from, to, n,
		     (int)o->type, 0, comm, o->stream);
	else if (!strcmp(o->kind, "bcast"))
		CALL(0, ncclBcast, (void *, size_t, int, int, void *, void *), to, n, (int)o->type, 0, comm, o->stream);
	else if (!strcmp(o->kind, "send"))
		CALL(0, ncclSend, (const void *, size_t, int, int, void *, void *), from, n, (int)o->type, 0, comm,
		     o->stream);
	else if (!strcmp(o->kind, "recv"))
		CALL(0, ncclRecv, (void *, size_t, int, int, void *, void *), to, n, (int)o->type, 0, comm, o->stream);
	else
		fail("no such collective", o->kind);
}

void group_start(void)
{
	CALL(0, ncclGroupStart, (void));
}

void group_end(void)
{
	CALL(0, ncclGroupEnd, (void));
}
