/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stand-in for NVIDIA's libnvidia-ml.so.1: the same symbols with the same arguments, whose answers stand in a
 * script beside the library (README.md). Here: the library itself, handles, what GPUs and MIG instances are.
 *
 * Arguments and return values are as the functions of the module pynvml call them; which refusals NVML gives is
 * from the comments of NVIDIA's nvml.h.
 *
 * -DPROCESS_LISTS=2 leaves out the process lists with _v3, 1 those with _v2 too, 0 all. -DRECORD_V3=TYPE lets
 * those with _v3 give other records. -DWITHOUT_GPM and -DOLD_DRIVER leave out what came later.
 */
#include "nvml_script.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

#define SLOTS FIRST_SLOT(0)

/* ---- the library */

static nvmlReturn_t initialise(void)
{
	if (!attribute(NULL, "devices"))
		return NVML_ERROR_DRIVER_NOT_LOADED;
	initialised++;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
	BEGIN(NULL, BEFORE_INIT);
	(void)flags;
	return initialise();
}

EXPORT nvmlReturn_t nvmlInit_v2(void)
{
	BEGIN(NULL, BEFORE_INIT);
	return initialise();
}

EXPORT nvmlReturn_t nvmlShutdown(void)
{
	/* The real one does not mind one too many. */
	BEGIN(NULL, BEFORE_INIT);
	if (initialised)
		initialised--;
	return NVML_SUCCESS;
}

EXPORT const char *nvmlErrorString(nvmlReturn_t result)
{
	static const char *const words[] = {
		"Success",
		"Uninitialized",
		"Invalid Argument",
		"Not Supported",
		"Insufficient Permissions",
		"Already Initialized",
		"Not Found",
		"Insufficient Size",
		"Insufficient External Power",
		"Driver Not Loaded",
		"Timeout",
		"Interrupt Request Issue",
		"NVML Shared Library Not Found",
		"Function Not Found",
		"Corrupted infoROM",
		"GPU is lost",
		"GPU requires reset",
		"GPU access blocked by the operating system",
		"Driver/library version mismatch",
		"In use by another client",
		"Insufficient Memory",
		"No data",
		"vGPU ECC not supported",
		"Insufficient Resources",
		"Invalid Frequency",
		"Argument version mismatch",
		"Requested functionality has been deprecated",
		"System is not in ready state",
	};

	return (unsigned int)result < sizeof(words) / sizeof(*words) ? words[result] : "Unknown Error";
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
	BEGIN(NULL, NO_DEVICE);
	return text(NULL, "driver_version", version, length);
}

EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
	/* Its own version it knows without a driver. */
	BEGIN(NULL, BEFORE_INIT);
	return version ? text(NULL, "nvml_version", version, length) : NVML_ERROR_INVALID_ARGUMENT;
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
	BEGIN(NULL, NO_DEVICE);
	return small_number(NULL, "cuda_version", (unsigned int *)version);
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
	BEGIN(NULL, NO_DEVICE);
	return small_number(NULL, "cuda_version", (unsigned int *)version);
}

/* ---- handles */

/* What is said of all functions of a GPU, that it is lost say, holds for asking for its handle too. */
static nvmlReturn_t give_handle(const char *function, nvmlDevice_t found, nvmlDevice_t *to)
{
	nvmlReturn_t result = failure(function, found);

	if (result == NVML_SUCCESS)
		*to = found;
	return result;
}

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
	BEGIN(NULL, NO_DEVICE);
	if (!count)
		return NVML_ERROR_INVALID_ARGUMENT;
	*count = device_count();
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
	BEGIN(index < MAX_DEVICES ? handle_of(index, -1) : NULL, index < MAX_DEVICES ? ANY : NO_DEVICE);
	if (!device || index >= device_count())
		return NVML_ERROR_INVALID_ARGUMENT;
	*device = handle_of(index, -1);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
	BEGIN(NULL, NO_DEVICE);
	if (!uuid || !device)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (unsigned int i = 0; i < device_count(); i++)
		for (int instance = -1; instance < MAX_INSTANCES; instance++) {
			const char *own = attribute(handle_of(i, instance), "uuid");

			if (own && !strcmp(own, uuid) && (instance < 0 || mig_enabled(handle_of(i, -1))))
				return give_handle(__func__, handle_of(i, instance), device);
		}
	return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device)
{
	BEGIN(NULL, NO_DEVICE);
	if (!bus_id || !device)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (unsigned int i = 0; i < device_count(); i++) {
		const char *own = attribute(handle_of(i, -1), "pci_bus_id");

		/* With a domain of eight digits or four. */
		if (own && (!strcmp(own, bus_id) || (strlen(own) > 4 && !strcmp(own + 4, bus_id))))
			return give_handle(__func__, handle_of(i, -1), device);
	}
	return NVML_ERROR_NOT_FOUND;
}

/* ---- what a GPU is */

#define TEXT(function, key)                                                                                            \
	EXPORT nvmlReturn_t function(nvmlDevice_t device, char *to, unsigned int length)                               \
	{                                                                                                              \
		BEGIN(device, ANY);                                                                                    \
		return text(device, key, to, length);                                                                  \
	}                                                                                                              \
	static_assert(1, "")

TEXT(nvmlDeviceGetUUID, "uuid");
TEXT(nvmlDeviceGetName, "name");
TEXT(nvmlDeviceGetSerial, "serial");
NUMBER(nvmlDeviceGetMinorNumber, "minor", WHOLE);
NUMBER(nvmlDeviceGetPersistenceMode, "persistence", WHOLE);

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
	BEGIN(device, ANY);
	if (!index)
		return NVML_ERROR_INVALID_ARGUMENT;
	*index = device->instance < 0 ? device->device : device->instance;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
	nvmlReturn_t result;

	BEGIN(device, WHOLE);
	if (!pci)
		return NVML_ERROR_INVALID_ARGUMENT;
	memset(pci, 0, sizeof(*pci));
	result = text(device, "pci_bus_id", pci->busId, sizeof(pci->busId));
	if (result != NVML_SUCCESS)
		return result;
	if (sscanf(pci->busId, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device) == 3)
		snprintf(pci->busIdLegacy, sizeof(pci->busIdLegacy), "%04X:%02X:%02X.0", pci->domain & 0xffff,
			 pci->bus & 0xff, pci->device & 0xff);
	pci->pciDeviceId = number_or(device, "pci_device_id", 0);
	pci->pciSubSystemId = number_or(device, "pci_subsystem_id", 0);
	return NVML_SUCCESS;
}

/* ---- MIG */

#ifndef OLD_DRIVER
EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
	nvmlReturn_t result;

	BEGIN(device, WHOLE);
	result = small_number(device, "mig_mode", current);
	if (result == NVML_SUCCESS && pending)
		*pending = number_or(device, "mig_mode_pending", *current);
	return result;
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
	BEGIN(device, WHOLE);
	if (!count)
		return NVML_ERROR_INVALID_ARGUMENT;
	*count = mig_enabled(device) ? number_or(device, "max_mig", 7) : 0;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *instance)
{
	BEGIN(device, WHOLE);
	if (!mig_enabled(device))
		return NVML_ERROR_NOT_SUPPORTED;
	if (!instance || index >= MAX_INSTANCES || index >= number_or(device, "max_mig", 7))
		return NVML_ERROR_INVALID_ARGUMENT;
	if (!attribute(handle_of(device->device, index), "uuid"))
		return NVML_ERROR_NOT_FOUND;
	*instance = handle_of(device->device, index);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is)
{
	BEGIN(device, ANY);
	if (!is)
		return NVML_ERROR_INVALID_ARGUMENT;
	*is = device->instance >= 0;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
	BEGIN(device, ANY);
	return device->instance < 0 ? NVML_ERROR_INVALID_ARGUMENT : small_number(device, "gpu_instance", id);
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id)
{
	BEGIN(device, ANY);
	return device->instance < 0 ? NVML_ERROR_INVALID_ARGUMENT : small_number(device, "compute_instance", id);
}

EXPORT nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t instance, nvmlDevice_t *device)
{
	BEGIN(instance, ANY);
	if (!device || instance->instance < 0)
		return NVML_ERROR_INVALID_ARGUMENT;
	*device = handle_of(instance->device, -1);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *to)
{
	unsigned long long mib;
	nvmlReturn_t result;

	BEGIN(device, ANY);
	if (device->instance < 0)
		return NVML_ERROR_NOT_SUPPORTED;
	if (!to)
		return NVML_ERROR_INVALID_ARGUMENT;
	result = number(device, "memory_mib", &mib);
	if (result != NVML_SUCCESS)
		return result;
	*to = (nvmlDeviceAttributes_t){
		.multiprocessorCount = number_or(device, "multiprocessors", 0),
		.sharedCopyEngineCount = number_or(device, "copy_engines", 1),
		.sharedDecoderCount = number_or(device, "decoders", 1),
		.sharedEncoderCount = number_or(device, "encoders", 0),
		.sharedJpegCount = number_or(device, "jpeg_engines", 1),
		.sharedOfaCount = number_or(device, "ofa_engines", 0),
		.gpuInstanceSliceCount = number_or(device, "gpu_slices", 1),
		.computeInstanceSliceCount = number_or(device, "compute_slices", 1),
		.memorySizeMB = mib,
	};
	return NVML_SUCCESS;
}
#endif

NO_MORE_SLOTS;
