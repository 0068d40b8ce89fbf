/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Looks like CPython 3.11 with glibc until SIGUSR1 says that it has been taken for one; then its memory is
 * made to mislead. The offsets, AT_..., come from the test. Writes its pid, and spins.
 */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FRAMES 4096
#define CODES 65536

uint32_t Py_Version = 0x030b07f0;
uint8_t _PyRuntime[1 << 16] __attribute__((aligned(64)));

static uint8_t interpreter[4096], threads[3][1024], frames[FRAMES][256], cframe[64], bytes[1 << 17];
static uint8_t codes[CODES][512], text[4096];

static void put(void *at, uint64_t value)
{
	memcpy(at, &value, sizeof(value));
}

static uint64_t random_word(void)
{
	static uint64_t state = 88172645463325252ull;

	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state;
}

/* A program of some functions that is as it should be. */
static void behave(void)
{
	uint64_t length = 5;

	memset(_PyRuntime, 0, sizeof(_PyRuntime));
	memset(interpreter, 0, sizeof(interpreter));
	memset(threads, 0, sizeof(threads));
	memset(frames, 0, sizeof(frames));
	put(_PyRuntime + AT_RUNTIME_INTERPRETERS, (uintptr_t)interpreter);
	put(_PyRuntime + AT_RUNTIME_INTERPRETERS + 8, (uintptr_t)interpreter);
	put(_PyRuntime + AT_RUNTIME_CURRENT, (uintptr_t)threads[0]);
	put(_PyRuntime + AT_RUNTIME_CURRENT + 8, (uintptr_t)interpreter);
	put(interpreter + AT_INTERPRETER_THREADS, (uintptr_t)threads[0]);
	put(threads[0] + AT_THREAD_INTERPRETER, (uintptr_t)interpreter);
	put(threads[0] + AT_THREAD_ID, (uintptr_t)__builtin_thread_pointer());
	put(threads[0] + AT_THREAD_NATIVE_ID, syscall(SYS_gettid));
	put(threads[0] + AT_THREAD_FRAME, (uintptr_t)cframe);
	put(cframe + AT_THREAD_FRAME_VIA, (uintptr_t)frames[0]);
	memcpy(text + AT_TEXT_LENGTH, &length, 8);
	text[AT_TEXT_STATE] = 1 << 2 | 1 << 5 | 1 << 6; /* one byte for a character, compact, ASCII */
	memcpy(text + AT_TEXT_COMPACT, "a\n;b\x1b", 5);
	put(bytes + AT_BYTES_LENGTH, 0);
	for (int i = 0; i < CODES; i++) {
		put(codes[i] + AT_CODE_NAME, (uintptr_t)text);
		put(codes[i] + AT_CODE_FILE, (uintptr_t)text);
		put(codes[i] + AT_CODE_LINES, (uintptr_t)bytes);
	}
	for (int i = 0; i < 3; i++) {
		put(frames[i] + AT_FRAME_CODE, (uintptr_t)codes[i]);
		put(frames[i] + AT_FRAME_INSTRUCTION, (uintptr_t)codes[i] + AT_CODE_INSTRUCTIONS);
		put(frames[i] + AT_FRAME_PREVIOUS, i < 2 ? (uintptr_t)frames[i + 1] : 0);
	}
}

static void cyclic_threads(void)
{
	put(threads[0] + AT_THREAD_ID, 1);
	put(threads[0] + AT_THREAD_NATIVE_ID, 1);
	put(threads[0] + AT_THREAD_NEXT, (uintptr_t)threads[1]);
	put(threads[1] + AT_THREAD_NEXT, (uintptr_t)threads[2]);
	put(threads[2] + AT_THREAD_NEXT, (uintptr_t)threads[1]);
	put(interpreter, (uintptr_t)interpreter);
}

static void cyclic_frames(void)
{
	put(frames[2] + AT_FRAME_PREVIOUS, (uintptr_t)frames[0]);
}

static void frames_of_nothing(void)
{
	/* Without code that was begun: looked at, and in no stack. */
	for (int i = 0; i < 3; i++)
		put(frames[i] + AT_FRAME_INSTRUCTION, 0);
	put(frames[2] + AT_FRAME_PREVIOUS, (uintptr_t)frames[0]);
}

static void absurd_lengths(void)
{
	put(text + AT_TEXT_LENGTH, random_word());
	put(bytes + AT_BYTES_LENGTH, random_word() % 2 ? 0x7fffffff : 1 << 16);
	put(codes[0] + AT_CODE_FIRST_LINE, random_word());
}

/* At each sample another deep stack of code that nobody has seen. */
static void floods(void)
{
	for (int i = 0; i < 128; i++) {
		uint8_t *code = codes[random_word() % CODES];

		put(code + AT_CODE_FIRST_LINE, random_word());
		put(frames[i] + AT_FRAME_CODE, (uintptr_t)code);
		put(frames[i] + AT_FRAME_INSTRUCTION, (uintptr_t)code + AT_CODE_INSTRUCTIONS + random_word() % 4096);
		put(frames[i] + AT_FRAME_PREVIOUS, i < 127 ? (uintptr_t)frames[i + 1] : 0);
	}
}

static void garbage(void)
{
	uint8_t *at[] = {_PyRuntime + AT_RUNTIME_INTERPRETERS,
			 interpreter,
			 threads[0],
			 frames[0],
			 codes[0],
			 text,
			 bytes,
			 cframe};

	for (int i = 0; i < 8; i++) {
		uint8_t *where = at[random_word() % 8];
		uint64_t value = random_word();

		/* An address, mapped or not, or nothing like it. */
		if (value % 3 == 0)
			value = (uintptr_t)at[value % 8] + value % 512;
		else if (value % 3 == 1)
			value &= 0xffffffff;
		put(where + random_word() % 256, value);
	}
}

static volatile sig_atomic_t believed;

static void taken_in(int signal)
{
	believed = signal;
}

int main(int count, char **arguments)
{
	void (*ways[])(void) = {behave,		cyclic_threads, cyclic_frames, frames_of_nothing,
				absurd_lengths, floods,		garbage};
	int way = count > 1 ? atoi(arguments[1]) : 0;

	signal(SIGUSR1, taken_in);
	behave();
	printf("%d\n", getpid());
	fflush(stdout);
	while (!believed)
		;
	for (;;) {
		if (way)
			ways[way]();
		for (volatile int i = 0; i < 100000; i++)
			;
		if (way > 4 && random_word() % 64 == 0)
			behave();
	}
}
