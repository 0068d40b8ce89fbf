/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Does what its arguments say, or else what its standard input says, and ends with a line of JSON: exactly how
 * often it called what. Commands are parted by `;` or newlines; README.md lists them. SIGTERM ends the script
 * before its next call, and the line is written all the same.
 */
#include "calls.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { COMMANDS = 256, WORDS = 12, THREADS = 64, PROCESSES = 64 };

/* The script, as words. */
static char *script[COMMANDS][WORDS + 1];
static int commands;
static volatile sig_atomic_t ended;
static int exit_code;

static void end(int signal)
{
	(void)signal;
	ended = 1;
}

static void pause_us(unsigned long us)
{
	struct timespec left = {(time_t)(us / 1000000), (long)(us % 1000000) * 1000};
	while (!ended && nanosleep(&left, &left) && errno == EINTR)
		;
}

static unsigned long number(const char *text)
{
	char *rest = NULL;
	unsigned long value = text ? strtoul(text, &rest, 0) : 0;
	if (!text || rest == text || *rest)
		fail("no number", text ? text : "nothing");
	return value;
}

static void three(unsigned int *into, const char *text)
{
	if (sscanf(text, "%u,%u,%u", &into[0], &into[1], &into[2]) < 1)
		fail("no dimensions", text);
}

/* NAME=VALUE words and the words `async` and `group`. */
static void read_options(struct options *options, char **words)
{
	for (; *words; words++) {
		char *value = strchr(*words, '=');
		size_t length = value ? (size_t)(value++ - *words) : strlen(*words);
#define IS(name) (length == strlen(name) && !strncmp(*words, name, length))
		if (!value && IS("async"))
			options->async = true;
		else if (!value && IS("group"))
			options->group = true;
		else if (!value)
			fail("no such option", *words);
		else if (IS("via"))
			options->via = value;
		else if (IS("how"))
			options->how = value;
		else if (IS("grid"))
			three(options->grid, value);
		else if (IS("block"))
			three(options->block, value);
		else if (IS("shared"))
			options->shared = number(value);
		else if (IS("stream"))
			options->stream = (void *)number(value);
		else if (IS("kernel"))
			options->kernel = strcmp(value, "module") ? (int)(number(value) & 3) : -1;
		else if (IS("type"))
			options->type = (unsigned int)number(value);
		else if (IS("every_us"))
			options->every_us = (unsigned int)number(value);
		else
			fail("no such option", *words);
#undef IS
	}
}

/* What can be done N times; `form` names the words before the options: k kind, b bytes, r rows, n how often. */
static const struct {
	const char *name, *form;
	void (*call)(const struct options *options);
} calls[] = {
	{"launch", "n", launch},       {"graph", "n", graph},	   {"copy", "kbn", copy},
	{"copy2d", "kbrn", copy_rows}, {"peer", "bn", copy_peer},  {"set", "bn", set},
	{"alloc", "bn", allocate},     {"sync", "n", synchronize}, {"collective", "kbn", collective},
};

static bool do_call(char **words)
{
	for (size_t i = 0; i < sizeof(calls) / sizeof(*calls); i++) {
		if (strcmp(calls[i].name, words[0]))
			continue;
		struct options options = {
			.via = "plain", .how = "device", .grid = {1, 1, 1}, .block = {32, 1, 1}, .type = 7};
		unsigned long times = 0;
		words++;
		for (const char *form = calls[i].form; *form; form++, words++) {
			if (*form == 'k' && *words)
				options.kind = *words;
			else if (*form == 'b')
				options.bytes = number(*words);
			else if (*form == 'r')
				options.rows = number(*words);
			else
				times = number(*words);
		}
		read_options(&options, words);
		if (options.group)
			group_start();
		for (unsigned long done = 0; done < times && !ended; done++) {
			calls[i].call(&options);
			if (options.every_us)
				pause_us(options.every_us);
		}
		if (options.group)
			group_end();
		return true;
	}
	return false;
}

static void run(int from);

/* The children do the rest; SIGTERM is handed on to them. */
static void fork_here(int next, unsigned long children)
{
	pid_t started[PROCESSES];
	if (children > PROCESSES)
		fail("fork", "too many");
	fflush(stdout);
	for (unsigned long i = 0; i < children; i++) {
		started[i] = fork();
		if (started[i] < 0)
			fail("fork", strerror(errno));
		if (!started[i]) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			forget();
			run(next);
			report();
			_exit(exit_code);
		}
	}
	/* Not in waitpid(): a signal just before that would be missed. */
	bool handed_on = false;
	for (unsigned long i = 0; i < children; i++)
		while (!waitpid(started[i], NULL, WNOHANG)) {
			struct timespec moment = {0, 1000000};
			for (unsigned long j = i; ended && !handed_on && j < children; j++)
				kill(started[j], SIGTERM);
			handed_on = ended;
			nanosleep(&moment, NULL);
		}
}

static void *run_thread(void *next)
{
	run((int)(long)next);
	return NULL;
}

static void thread_here(int next, unsigned long threads)
{
	pthread_t started[THREADS];
	if (threads > THREADS)
		fail("threads", "too many");
	for (unsigned long i = 0; i < threads; i++)
		if (pthread_create(&started[i], NULL, run_thread, (void *)(long)next))
			fail("threads", "none can be started");
	for (unsigned long i = 0; i < threads; i++)
		pthread_join(started[i], NULL);
}

/* The commands from the one numbered `from` on. */
static void run(int from)
{
	for (int i = from; i < commands && !ended; i++) {
		char **words = script[i];
		if (do_call(words)) {
			continue;
		} else if (!strcmp(words[0], "fork")) {
			fork_here(i + 1, number(words[1]));
			return;
		} else if (!strcmp(words[0], "threads")) {
			thread_here(i + 1, number(words[1]));
			return;
		} else if (!strcmp(words[0], "repeat")) {
			unsigned long times = number(words[1]);
			for (unsigned long done = 0; (!times || done < times) && !ended; done++)
				run(i + 1);
			return;
		} else if (!strcmp(words[0], "dlopen") && words[1]) {
			load(words[1]);
		} else if (!strcmp(words[0], "dlclose")) {
			unload();
		} else if (!strcmp(words[0], "module") && words[1]) {
			module(words[1]);
		} else if (!strcmp(words[0], "sleep")) {
			pause_us(number(words[1]) * 1000);
		} else if (!strcmp(words[0], "say") && words[1]) {
			printf("%s\n", words[1]);
			fflush(stdout);
		} else if (!strcmp(words[0], "wait")) {
			char byte = 0;
			while (!ended && read(STDIN_FILENO, &byte, 1) == 1 && byte != '\n')
				;
		} else if (!strcmp(words[0], "exit")) {
			exit_code = words[1] ? (int)number(words[1]) : 0;
			ended = 1;
		} else {
			fail("no such command", words[0]);
		}
	}
}

static void split(char *text)
{
	char *rest = NULL;
	for (char *line = strtok_r(text, ";\n", &rest); line; line = strtok_r(NULL, ";\n", &rest)) {
		char *tail = NULL;
		int words = 0;
		if (commands == COMMANDS)
			fail("script", "too long");
		for (char *word = strtok_r(line, " \t", &tail); word && words < WORDS;
		     word = strtok_r(NULL, " \t", &tail))
			script[commands][words++] = word;
		commands += words > 0;
	}
}

int main(int argc, char **argv)
{
	static char text[1 << 16];
	struct sigaction action = {.sa_handler = end};
	sigaction(SIGTERM, &action, NULL);
	if (argc > 1) {
		for (int i = 1; i < argc; i++) {
			strncat(text, argv[i], sizeof(text) - strlen(text) - 1);
			strncat(text, ";", sizeof(text) - strlen(text) - 1);
		}
	} else if (fread(text, 1, sizeof(text) - 1, stdin) == 0) {
		fail("script", "there is none");
	}
	split(text);
	run(0);
	report();
	return exit_code;
}
