/* SPDX-License-Identifier: Apache-2.0 */
/* A library with a thread that spins and that no interpreter knows. */
#include <pthread.h>
#include <stddef.h>

static void *spin(void *unused)
{
	for (volatile unsigned long i = 0;; i++)
		;
	return unused;
}

int start(void)
{
	pthread_t thread;

	return pthread_create(&thread, NULL, spin, NULL);
}
