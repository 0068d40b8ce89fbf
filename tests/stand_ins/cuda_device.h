/* SPDX-License-Identifier: Apache-2.0 */
/* What does the work: a device made of host memory. The driver has one, and a runtime that does without a driver. */
#pragma once

#include "cuda_abi.h"

#define EXPORT __attribute__((visibility("default")))
/* Symbols that are seen from outside only where -DHIDDEN does not say otherwise. */
#ifdef HIDDEN
#define PUBLIC
#else
#define PUBLIC EXPORT
#endif

/* Called inside of every call below, with the name of what does the work. */
extern PUBLIC void (*stand_in_inside)(const char *function);

#define DEVICE(name, inner, ...) DEVICE_(inner, __VA_ARGS__)
#define DEVICE_(inner, parameters, arguments) CUresult device_##inner parameters;
DRIVER_FUNCTIONS(DEVICE)

/* All of them, under the names of the entries that they stand behind. */
extern const struct driver device_functions;
