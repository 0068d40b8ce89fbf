/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stand-in for NVIDIA's libnccl.so.2, with a runtime of its own linked into it whose symbols are hidden. A
 * collective launches one kernel; within a group nothing is launched before the group's end, which launches one
 * for all. As with the real one each function has a second name, with a p before it, at the same address.
 *
 * Prototypes are as in nccl.h of NCCL 2.
 */
#include "cuda_runtime_abi.h"

#include <stdlib.h>
#include <string.h>

typedef int ncclResult_t;
typedef int ncclDataType_t;
typedef int ncclRedOp_t;
typedef struct ncclComm *ncclComm_t;
typedef struct {
	char internal[128];
} ncclUniqueId;

enum { ncclSuccess = 0, ncclUnhandledCudaError = 1, ncclInvalidArgument = 4, ncclInvalidUsage = 5 };

struct ncclComm {
	int ranks, rank, device;
};

#define NCCL(name, ...)                                                                                                \
	EXPORT ncclResult_t name(__VA_ARGS__);                                                                         \
	EXPORT ncclResult_t p##name(__VA_ARGS__) __attribute__((alias(#name)));                                        \
	ncclResult_t name(__VA_ARGS__)

static __thread int depth;
static __thread int queued;

/* A host stub, as nvcc makes them. */
void kernel(void *args) __asm__("_Z21ncclDevKernel_GenericPv");
__attribute__((noinline, visibility("hidden"))) void kernel(void *args)
{
	__asm__ volatile("" : : "r"(args));
}

static ncclResult_t launch(cudaStream_t stream)
{
	cudaLaunchConfig_t config = {.gridDim = {24, 1, 1}, .blockDim = {544, 1, 1}, .stream = stream};
	return cudaLaunchKernelExC(&config, (const void *)kernel, NULL) ? ncclUnhandledCudaError : ncclSuccess;
}

static ncclResult_t collective(ncclComm_t comm, cudaStream_t stream)
{
	if (!comm)
		return ncclInvalidArgument;
	if (depth) {
		queued++;
		return ncclSuccess;
	}
	return launch(stream);
}

/* ---- communicators */

NCCL(ncclGetVersion, int *version)
{
	*version = 22703;
	return ncclSuccess;
}

NCCL(ncclGetUniqueId, ncclUniqueId *id)
{
	memset(id, 1, sizeof(*id));
	return ncclSuccess;
}

NCCL(ncclCommInitRank, ncclComm_t *comm, int ranks, ncclUniqueId id, int rank)
{
	(void)id;
	*comm = malloc(sizeof(**comm));
	**comm = (struct ncclComm){.ranks = ranks, .rank = rank, .device = rank};
	return ncclSuccess;
}

NCCL(ncclCommInitAll, ncclComm_t *comms, int devices, const int *list)
{
	for (int i = 0; i < devices; i++) {
		comms[i] = malloc(sizeof(*comms[i]));
		*comms[i] = (struct ncclComm){.ranks = devices, .rank = i, .device = list ? list[i] : i};
	}
	return ncclSuccess;
}

NCCL(ncclCommDestroy, ncclComm_t comm)
{
	free(comm);
	return ncclSuccess;
}

/* ---- groups */

NCCL(ncclGroupStart, void)
{
	depth++;
	return ncclSuccess;
}

NCCL(ncclGroupEnd, void)
{
	if (!depth)
		return ncclInvalidUsage;
	if (--depth || !queued)
		return ncclSuccess;
	queued = 0;
	return launch(NULL);
}

/* ---- collectives */

NCCL(ncclAllReduce, const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
     cudaStream_t stream)
{
	(void)from, (void)to, (void)count, (void)type, (void)op;
	return collective(comm, stream);
}

NCCL(ncclReduceScatter, const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
     cudaStream_t stream)
{
	(void)from, (void)to, (void)count, (void)type, (void)op;
	return collective(comm, stream);
}

NCCL(ncclAllGather, const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream)
{
	(void)from, (void)to, (void)count, (void)type;
	return collective(comm, stream);
}

NCCL(ncclReduce, const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
     ncclComm_t comm, cudaStream_t stream)
{
	(void)from, (void)to, (void)count, (void)type, (void)op, (void)root;
	return collective(comm, stream);
}

NCCL(ncclBroadcast, const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
     cudaStream_t stream)
{
	(void)from, (void)to, (void)count, (void)type, (void)root;
	return collective(comm, stream);
}

/* The old form; it calls the new one. */
NCCL(ncclBcast, void *data, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream)
{
	return ncclBroadcast(data, data, count, type, root, comm, stream);
}

NCCL(ncclSend, const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream)
{
	(void)from, (void)count, (void)type, (void)peer;
	return collective(comm, stream);
}

NCCL(ncclRecv, void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream)
{
	(void)to, (void)count, (void)type, (void)peer;
	return collective(comm, stream);
}
