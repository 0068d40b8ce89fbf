/*
 * Sleeps so many times, each for 50 us: on a CPU of its own, every second switch is to the idle task.
 *
 * Usage: pmu_sleeps TIMES. It stops itself before and after.
 */
#include <signal.h>
#include <stdlib.h>
#include <time.h>

int main(int argc, char **argv)
{
	const struct timespec nap = {.tv_nsec = 50000};
	unsigned long times;

	if (argc != 2)
		return 2;
	times = strtoul(argv[1], NULL, 10);
	raise(SIGSTOP);
	while (times--)
		nanosleep(&nap, NULL);
	raise(SIGSTOP);
	return 0;
}
