/* SPDX-License-Identifier: Apache-2.0 */
/*
 * crasher MODE CALL TIMES: does inside of a CUDA call what a tracer may stumble over, and says how many calls came
 * back. CALL is launch, wrapper, copy or sync. MODE:
 *
 * plain    nothing
 * longjmp  leaves every call by longjmp
 * context  two stacks take turns within their calls, so that calls of one thread end in another order
 * thread   every call is on a thread of its own, which ends inside of it
 * fork     every call has a child, which comes back from the call as well and then ends
 */
#include "../cuda_runtime_abi.h"
#include "kernels.h"

#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

enum { STACK = 256 * 1024 };

static const char *mode, *function;
static unsigned long times, returned, other_returned, inside, failures;
static _Thread_local bool armed;
static jmp_buf start;
static ucontext_t contexts[2];
static int context;
static pid_t parent;

static int call(void)
{
	static char bytes[64];
	const void *stub = kernels[0].stub;
	dim3 grid = {2, 1, 1}, block = {32, 1, 1};
	if (!strcmp(function, "launch"))
		return cudaLaunchKernel(stub, grid, block, NULL, 0, NULL);
	if (!strcmp(function, "wrapper"))
		return __cudaLaunchKernel((cudaKernel_t)stub, grid, block, NULL, 0, NULL);
	if (!strcmp(function, "copy"))
		return cudaMemcpy(bytes, bytes + 32, 32, cudaMemcpyHostToDevice);
	if (!strcmp(function, "sync"))
		return cudaStreamSynchronize(NULL);
	fprintf(stderr, "crasher: no such call: %s\n", function);
	exit(3);
}

static void call_and_come_back(unsigned long *count)
{
	armed = true;
	failures += call() != 0;
	++*count;
}

static void switch_stack(void)
{
	int from = context;
	context = !from;
	swapcontext(&contexts[from], &contexts[context]);
}

/* The stand-in calls this inside of every call. */
static void in_call(const char *name)
{
	(void)name;
	if (!armed)
		return;
	armed = false;
	inside++;
	if (!strcmp(mode, "longjmp"))
		longjmp(start, 1);
	if (!strcmp(mode, "context"))
		switch_stack();
	if (!strcmp(mode, "thread"))
		pthread_exit(NULL);
	if (!strcmp(mode, "fork")) {
		pid_t child = fork();
		if (child > 0)
			waitpid(child, NULL, 0);
	}
}

static void other_stack(void)
{
	for (;;)
		call_and_come_back(&other_returned);
}

static void *thread(void *nothing)
{
	(void)nothing;
	call_and_come_back(&returned);
	return NULL;
}

static void do_one(void)
{
	pthread_t started;
	if (!strcmp(mode, "longjmp")) {
		if (!setjmp(start))
			call_and_come_back(&returned);
	} else if (!strcmp(mode, "thread")) {
		if (pthread_create(&started, NULL, thread, NULL))
			exit(4);
		pthread_join(started, NULL);
	} else {
		call_and_come_back(&returned);
		if (getpid() != parent)
			_exit(0);
	}
}

int main(int argc, char **argv)
{
	if (argc != 4) {
		fprintf(stderr, "crasher MODE CALL TIMES\n");
		return 2;
	}
	mode = argv[1], function = argv[2], times = strtoul(argv[3], NULL, 10);
	parent = getpid();
	call(); /* loads the driver */
	void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
	void (**of_driver)(const char *) = driver ? dlsym(driver, "stand_in_inside") : NULL;
	stand_in_inside = in_call;
	if (of_driver)
		*of_driver = in_call;
	getcontext(&contexts[1]);
	contexts[1].uc_stack.ss_sp = malloc(STACK);
	contexts[1].uc_stack.ss_size = STACK;
	makecontext(&contexts[1], other_stack, 0);
	printf("ready\n");
	fflush(stdout);
	if (getchar() == EOF)
		return 5;
	for (unsigned long i = 0; i < times; i++)
		do_one();
	printf("%s %s: %lu calls, %lu inside, %lu and %lu came back, %lu failed\n", mode, function, times + 1, inside,
	       returned, other_returned, failures);
	return 7;
}
