/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels.h"

/* What takes no arguments here, as nobody calls it. */
#define STUB(linkage, function, symbol)                                                                                \
	linkage void function(void) __asm__(symbol);                                                                   \
	__attribute__((noinline)) linkage void function(void)                                                          \
	{                                                                                                              \
		__asm__ volatile("");                                                                                  \
	}

STUB(, scale, "_Z5scaleIfEvPT_i")
STUB(, add, "_Z3addPKfS0_Pfi")
STUB(, forward, "_ZN5model7forwardILi128EEEvPKfPf")
STUB(static, fill, "_ZL4fillPfi")

const struct kernel kernels[KERNELS] = {
	{scale, "void scale<float>(float*, int)"},
	{add, "add(float const*, float const*, float*, int)"},
	{forward, "void model::forward<128>(float const*, float*)"},
	{fill, "fill(float*, int)"},
};
