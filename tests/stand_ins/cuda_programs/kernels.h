/* SPDX-License-Identifier: Apache-2.0 */
/* Host stubs, as nvcc makes one for each kernel: their addresses are what a program launches. */
#pragma once

struct kernel {
	const void *stub;
	const char *name; /* demangled */
};

enum { KERNELS = 4 };
extern const struct kernel kernels[KERNELS];
