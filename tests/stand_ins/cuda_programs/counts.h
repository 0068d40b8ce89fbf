/* SPDX-License-Identifier: Apache-2.0 */
/* Calling what may be linked or loaded, and counting it. */
#pragma once

#include "calls.h"

#include "../cuda_runtime_abi.h"
#include "kernels.h"

void *find(const char *name); /* NULL: there is none */
void *need(const char *name); /* ends the program where there is none */
void count(const char *name, unsigned long bytes, int result);
void count_launch(int kernel);

/* CALL(bytes, cudaX, (its types), its arguments...): calls and counts, and gives what the function gives. */
#define CALL(bytes, name, types, ...)                                                                                  \
	({                                                                                                             \
		int(*function) types = need(#name);                                                                    \
		int result_ = function(__VA_ARGS__);                                                                   \
		count(#name, bytes, result_);                                                                          \
		result_;                                                                                               \
	})
