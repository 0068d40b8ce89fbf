/*
 * Work of a known number of instructions, in turns: wait for a byte, count down, pass the byte on.
 *
 * Usage: pmu_turns COUNT TURNS <FROM >TO. Two of them in a ring take the CPU in turn. A COUNT of 0 passes
 * the byte on at once. It stops itself before the first turn and after the last, so that what was counted
 * for it can be read while it stands still.
 */
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

/* Two instructions per count, whatever the compiler thinks of it. */
static void count_down(unsigned long count)
{
	__asm__ volatile("1: subs %0, %0, #1\n\tb.ne 1b" : "+r"(count) : : "cc");
}

int main(int argc, char **argv)
{
	unsigned long count, turns;
	char byte;

	if (argc != 3)
		return 2;
	count = strtoul(argv[1], NULL, 10);
	turns = strtoul(argv[2], NULL, 10);
	raise(SIGSTOP);
	while (turns--) {
		if (read(0, &byte, 1) != 1)
			return 1;
		if (count)
			count_down(count);
		if (write(1, &byte, 1) != 1)
			return 1;
	}
	raise(SIGSTOP);
	return 0;
}
