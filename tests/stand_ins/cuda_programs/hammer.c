/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hammer RATE SECONDS [work=STEPS] [gaps=NS]: launches so often a second (0: as fast as it can) for so long, or until
 * SIGTERM. Between launches it spins, so that nothing but the launch is between the clock's readings. A line of JSON
 * says what launches took, less what reading the clock takes; SIGUSR1 asks for one, and what follows counts anew.
 *
 * work: so many steps of arithmetic before each launch, whatever the RATE. What slows the program down, be it in its
 * launches or not, shows in its rate and in its CPU time for each launch.
 * gaps: tells of each time between two readings of the clock that is NS or more: [when it began, how long], in ns.
 */
#include "../cuda_runtime_abi.h"
#include "kernels.h"

#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifdef LINKED_DRIVER
CUresult cuLaunchKernel(CUfunction, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
			unsigned int, CUstream, void **, void **);
#endif

enum { LONGEST_NS = 1 << 17, MOST_GAPS = 1 << 14 };

static volatile sig_atomic_t ended, asked;

/* Since the last line. */
static struct figures {
	uint64_t started, cpu, launches, total, errors, first;
	unsigned int gaps, histogram[LONGEST_NS]; /* of whole nanoseconds; the last is for all that are longer */
} figures;
static uint64_t gaps[MOST_GAPS][2], least_gap = UINT64_MAX, last;

static void heard(int signal)
{
	if (signal == SIGTERM)
		ended = 1;
	else
		asked = 1;
}

static uint64_t clock_of(clockid_t clock)
{
	struct timespec time;
	clock_gettime(clock, &time);
	return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static uint64_t now(void)
{
	uint64_t time = clock_of(CLOCK_MONOTONIC);
	if (time - last >= least_gap && figures.gaps < MOST_GAPS) {
		gaps[figures.gaps][0] = last;
		gaps[figures.gaps++][1] = time - last;
	}
	last = time;
	return time;
}

static uint64_t quantile(double share)
{
	uint64_t seen = 0;
	for (unsigned int ns = 0; ns < LONGEST_NS; ns++) {
		seen += figures.histogram[ns];
		if ((double)seen >= share * (double)figures.launches)
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

/* Each needs the one before it, and no memory. */
static void work(uint64_t steps)
{
	static volatile uint64_t kept;
	uint64_t value = kept;
	while (steps--)
		value = value * 6364136223846793005 + 1442695040888963407;
	kept = value;
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

static void begin(void)
{
	memset(&figures, 0, sizeof(figures));
	figures.cpu = clock_of(CLOCK_THREAD_CPUTIME_ID);
	figures.started = last = clock_of(CLOCK_MONOTONIC);
}

static void report(void)
{
	uint64_t cpu = clock_of(CLOCK_THREAD_CPUTIME_ID) - figures.cpu;
	double elapsed = (double)(clock_of(CLOCK_MONOTONIC) - figures.started) / 1e9;
	double launches = (double)figures.launches;
	printf("{\"pid\": %d, \"launches\": %lu, \"errors\": %lu, \"seconds\": %.6f, \"rate\": %.1f, ", getpid(),
	       figures.launches + figures.first, figures.errors, elapsed, elapsed ? launches / elapsed : 0);
	printf("\"mean_ns\": %.1f, \"median_ns\": %lu, \"p99_ns\": %lu, \"cpu_ns\": %lu",
	       launches ? (double)figures.total / launches : 0, quantile(0.5), quantile(0.99), cpu);
	if (least_gap != UINT64_MAX) {
		printf(", \"gaps\": [");
		for (unsigned int i = 0; i < figures.gaps; i++)
			printf("%s[%lu, %lu]", i ? ", " : "", gaps[i][0], gaps[i][1]);
		printf("]");
	}
	printf("}\n");
	fflush(stdout);
}

int main(int argc, char **argv)
{
	uint64_t steps = 0;
	for (int i = 3; i < argc; i++)
		if (!strncmp(argv[i], "work=", 5))
			steps = strtoull(argv[i] + 5, NULL, 10);
		else if (!strncmp(argv[i], "gaps=", 5))
			least_gap = strtoull(argv[i] + 5, NULL, 10);
		else
			argc = 0;
	if (argc < 3) {
		fprintf(stderr, "hammer RATE SECONDS [work=STEPS] [gaps=NS]\n");
		return 2;
	}
	double rate = steps ? 0 : atof(argv[1]), seconds = atof(argv[2]);
	struct sigaction action = {.sa_handler = heard};
	sigaction(SIGTERM, &action, NULL);
	sigaction(SIGUSR1, &action, NULL);
	if (launch(0)) /* loads the driver */
		return 3;
	uint64_t clock = clock_ns();
	begin();
	figures.first = 1;
	uint64_t time = figures.started, until = time + (uint64_t)(seconds * 1e9);
	while (time < until && !ended) {
		if (asked) {
			asked = 0;
			report();
			begin();
		}
		uint64_t due = rate ? figures.started + (uint64_t)((double)figures.launches * 1e9 / rate) : 0;
		work(steps);
		while (time < due && time < until && !ended && !asked)
			time = now();
		if (time >= until || ended)
			break;
		if (asked)
			continue;
		uint64_t from = now();
		figures.errors += launch(figures.launches) != 0;
		time = now();
		uint64_t took = time - from > clock ? time - from - clock : 0;
		figures.histogram[took < LONGEST_NS ? took : LONGEST_NS - 1]++;
		figures.total += took;
		figures.launches++;
	}
	report();
	return 0;
}
