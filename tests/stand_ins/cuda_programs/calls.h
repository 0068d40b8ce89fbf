/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of CUDA and NCCL, and exact counts of them. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/* What a command of the script says. */
struct options {
	const char *via, *how, *kind; /* in words, see README.md */
	unsigned int grid[3], block[3];
	size_t shared, bytes, rows;
	void *stream;
	int kernel; /* index into kernels; -1: the one that was loaded from a module */
	bool async, group;
	unsigned int type; /* an ncclDataType_t */
	unsigned int every_us;
};

/* One call, or for memory one allocation and its release. They end the program where the functions are missing. */
void launch(const struct options *options);
void graph(const struct options *options);
void copy(const struct options *options);
void copy_rows(const struct options *options);
void copy_peer(const struct options *options);
void set(const struct options *options);
void allocate(const struct options *options);
void synchronize(const struct options *options);
void collective(const struct options *options);
void group_start(void);
void group_end(void);
/* Loads a module and looks a kernel up. */
void module(const char *name);

void load(const char *path);
void unload(void);

/* Counts of this process: forgotten after a fork, and printed as one line of JSON. */
void forget(void);
void report(void);

void fail(const char *what, const char *detail);
