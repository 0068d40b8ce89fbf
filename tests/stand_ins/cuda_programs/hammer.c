/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hammer RATE SECONDS: launches so often a second (0: as fast as it can) for so long, or until SIGTERM. Between
 * launches it spins, so that nothing but the launch is between the clock's readings. A line of JSON says what
 * launches took, less what reading the clock takes.
 */
#include "../cuda_runtime_abi.h"
#include "kernels.h"

#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#ifdef LINKED_DRIVER
CUresult cuLaunchKernel(CUfunction, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
			unsigned int, CUstream, void **, void **);
#endif

enum { LONGEST_NS = 1 << 17 };

static volatile sig_atomic_t ended;
static unsigned int histogram[LONGEST_NS]; /* of whole nanoseconds; the last is for all that are longer */

static void end(int signal)
{
	(void)signal;
	ended = 1;
}

static uint64_t now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static uint64_t quantile(uint64_t launches, double share)
{
	uint64_t seen = 0;
	for (unsigned int ns = 0; ns < LONGEST_NS; ns++) {
		seen += histogram[ns];
		if ((double)seen >= share * (double)launches)
			return ns;
	}
	return LONGEST_NS;
}

static uint64_t clock_ns(void)
{
	enum { TIMES = 10000 };
	uint64_t from = now();
	for (int i = 0; i < TIMES; i++)
		now();
	return (now() - from) / TIMES;
}

static int launch(uint64_t number)
{
	dim3 grid = {256, 1, 1}, block = {128, 1, 1};
	const void *stub = kernels[number % KERNELS].stub;
#ifdef LINKED_DRIVER
	return cuLaunchKernel((CUfunction)stub, grid.x, grid.y, grid.z, block.x, block.y, block.z, 0, NULL, NULL, NULL);
#else
	return cudaLaunchKernel(stub, grid, block, NULL, 0, NULL);
#endif
}

int main(int argc, char **argv)
{
	if (argc != 3) {
		fprintf(stderr, "hammer RATE SECONDS\n");
		return 2;
	}
	double rate = atof(argv[1]), seconds = atof(argv[2]);
	struct sigaction action = {.sa_handler = end};
	sigaction(SIGTERM, &action, NULL);
	if (launch(0)) /* loads the driver */
		return 3;
	uint64_t clock = clock_ns(), launches = 0, total = 0, errors = 0;
	uint64_t started = now(), until = started + (uint64_t)(seconds * 1e9), time = started;
	while (time < until && !ended) {
		uint64_t due = rate ? started + (uint64_t)((double)launches * 1e9 / rate) : 0;
		while (time < due && time < until && !ended)
			time = now();
		if (time >= until || ended)
			break;
		uint64_t from = now();
		errors += launch(launches) != 0;
		time = now();
		uint64_t took = time - from > clock ? time - from - clock : 0;
		histogram[took < LONGEST_NS ? took : LONGEST_NS - 1]++;
		total += took;
		launches++;
	}
	double elapsed = (double)(time - started) / 1e9;
	double mean = launches ? (double)total / (double)launches : 0;
	printf("{\"pid\": %d, \"launches\": %lu, \"errors\": %lu, \"seconds\": %.6f, \"rate\": %.1f, ", getpid(),
	       launches + 1, errors, elapsed, elapsed ? (double)launches / elapsed : 0);
	printf("\"mean_ns\": %.1f, \"median_ns\": %lu, \"p99_ns\": %lu}\n", mean, quantile(launches, 0.5),
	       quantile(launches, 0.99));
	return 0;
}
