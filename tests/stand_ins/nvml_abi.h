/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What crosses the border between libnvidia-ml.so.1 and its callers.
 *
 * Every layout is that of the ctypes structure of the same name in the module pynvml (nvidia-ml-py 13.615), which
 * the comments name. The sizes are asserted here and held against ctypes.sizeof in test_nvml.py.
 */
#pragma once

#include <assert.h>
#include <stdint.h>

/* NVML_SUCCESS and NVML_ERROR_* in pynvml. */
typedef enum {
	NVML_SUCCESS = 0,
	NVML_ERROR_UNINITIALIZED = 1,
	NVML_ERROR_INVALID_ARGUMENT = 2,
	NVML_ERROR_NOT_SUPPORTED = 3,
	NVML_ERROR_NO_PERMISSION = 4,
	NVML_ERROR_NOT_FOUND = 6,
	NVML_ERROR_INSUFFICIENT_SIZE = 7,
	NVML_ERROR_DRIVER_NOT_LOADED = 9,
	NVML_ERROR_TIMEOUT = 10,
	NVML_ERROR_GPU_IS_LOST = 15,
	NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
	NVML_ERROR_UNKNOWN = 999,
} nvmlReturn_t;

/* Opaque to callers: c_nvmlDevice_t, c_nvmlEventSet_t and c_nvmlGpmSample_t are pointers. */
typedef const struct device *nvmlDevice_t;
typedef struct event_set *nvmlEventSet_t;
typedef struct gpm_sample *nvmlGpmSample_t;

/* c_nvmlUtilization_t */
typedef struct {
	unsigned int gpu;
	unsigned int memory;
} nvmlUtilization_t;
static_assert(sizeof(nvmlUtilization_t) == 8, "c_nvmlUtilization_t");

/* c_nvmlMemory_t */
typedef struct {
	unsigned long long total;
	unsigned long long free;
	unsigned long long used;
} nvmlMemory_t;
static_assert(sizeof(nvmlMemory_t) == 24, "c_nvmlMemory_t");

/* c_nvmlMemory_v2_t; the caller writes the version: size | number << 24, as in all structures that have one */
typedef struct {
	unsigned int version;
	unsigned long long total;
	unsigned long long reserved;
	unsigned long long free;
	unsigned long long used;
} nvmlMemory_v2_t;
static_assert(sizeof(nvmlMemory_v2_t) == 40, "c_nvmlMemory_v2_t");
#define NVML_MEMORY_V2 0x02000028

/* nvmlPciInfo_t */
typedef struct {
	char busIdLegacy[16];
	unsigned int domain;
	unsigned int bus;
	unsigned int device;
	unsigned int pciDeviceId;
	unsigned int pciSubSystemId;
	char busId[32];
} nvmlPciInfo_t;
static_assert(sizeof(nvmlPciInfo_t) == 68, "nvmlPciInfo_t");

/* What the process lists without a suffix give. pynvml has no such structure any more: it was the first two fields
 * of c_nvmlProcessInfo_v2_t, as in nvml.h of CUDA 10 (nvmlProcessInfo_t, now nvmlProcessInfo_v1_t). */
typedef struct {
	unsigned int pid;
	unsigned long long usedGpuMemory;
} nvmlProcessInfo_v1_t;
static_assert(sizeof(nvmlProcessInfo_v1_t) == 16, "nvmlProcessInfo_v1_t");

/* c_nvmlProcessInfo_v2_t and c_nvmlProcessInfo_v3_t */
typedef struct {
	unsigned int pid;
	unsigned long long usedGpuMemory;
	unsigned int gpuInstanceId;
	unsigned int computeInstanceId;
} nvmlProcessInfo_v2_t;
static_assert(sizeof(nvmlProcessInfo_v2_t) == 24, "c_nvmlProcessInfo_v2_t");

/* c_nvmlProcessDetail_v1_t. The lists with _v3 gave such records in the first drivers of the 535 line, and callers that
 * knew only the shorter ones took the second record to begin in the middle of the first. */
typedef struct {
	unsigned int pid;
	unsigned long long usedGpuMemory;
	unsigned int gpuInstanceId;
	unsigned int computeInstanceId;
	unsigned long long usedGpuCcProtectedMemory;
} nvmlProcessDetail_v1_t;
static_assert(sizeof(nvmlProcessDetail_v1_t) == 32, "c_nvmlProcessDetail_v1_t");

/* c_nvmlProcessUtilizationSample_t */
typedef struct {
	unsigned int pid;
	unsigned long long timeStamp;
	unsigned int smUtil;
	unsigned int memUtil;
	unsigned int encUtil;
	unsigned int decUtil;
} nvmlProcessUtilizationSample_t;
static_assert(sizeof(nvmlProcessUtilizationSample_t) == 32, "c_nvmlProcessUtilizationSample_t");

/* c_nvmlValue_t */
typedef union {
	double dVal;
	unsigned int uiVal;
	unsigned long ulVal;
	unsigned long long ullVal;
	long long sllVal;
	int siVal;
	unsigned short usVal;
} nvmlValue_t;
static_assert(sizeof(nvmlValue_t) == 8, "c_nvmlValue_t");

/* NVML_VALUE_TYPE_* */
enum { TYPE_DOUBLE, TYPE_UINT, TYPE_ULONG, TYPE_ULLONG, TYPE_SLLONG, TYPE_SINT, TYPE_USHORT };

/* c_nvmlSample_t */
typedef struct {
	unsigned long long timeStamp;
	nvmlValue_t sampleValue;
} nvmlSample_t;
static_assert(sizeof(nvmlSample_t) == 16, "c_nvmlSample_t");

/* c_nvmlFieldValue_t */
typedef struct {
	uint32_t fieldId;
	uint32_t scopeId;
	int64_t timestamp;
	int64_t latencyUsec;
	unsigned int valueType;
	unsigned int nvmlReturn;
	nvmlValue_t value;
} nvmlFieldValue_t;
static_assert(sizeof(nvmlFieldValue_t) == 40, "c_nvmlFieldValue_t");

/* c_nvmlViolationTime_t */
typedef struct {
	unsigned long long referenceTime;
	unsigned long long violationTime;
} nvmlViolationTime_t;
static_assert(sizeof(nvmlViolationTime_t) == 16, "c_nvmlViolationTime_t");

/* c_nvmlTemperature_v1_t */
typedef struct {
	unsigned int version;
	unsigned int sensorType;
	int temperature;
} nvmlTemperature_v1_t;
static_assert(sizeof(nvmlTemperature_v1_t) == 12, "c_nvmlTemperature_v1_t");
#define NVML_TEMPERATURE_V1 0x0100000C

/* c_nvmlDeviceAttributes */
typedef struct {
	unsigned int multiprocessorCount;
	unsigned int sharedCopyEngineCount;
	unsigned int sharedDecoderCount;
	unsigned int sharedEncoderCount;
	unsigned int sharedJpegCount;
	unsigned int sharedOfaCount;
	unsigned int gpuInstanceSliceCount;
	unsigned int computeInstanceSliceCount;
	unsigned long long memorySizeMB;
} nvmlDeviceAttributes_t;
static_assert(sizeof(nvmlDeviceAttributes_t) == 40, "c_nvmlDeviceAttributes");

/* c_nvmlEventData_t */
typedef struct {
	nvmlDevice_t device;
	unsigned long long eventType;
	unsigned long long eventData;
	unsigned int gpuInstanceId;
	unsigned int computeInstanceId;
} nvmlEventData_t;
static_assert(sizeof(nvmlEventData_t) == 32, "c_nvmlEventData_t");

/* c_nvmlGpmMetric_t, with c_metricInfo_t inside */
typedef struct {
	unsigned int metricId;
	unsigned int nvmlReturn;
	double value;
	struct {
		const char *shortName;
		const char *longName;
		const char *unit;
	} metricInfo;
} nvmlGpmMetric_t;
static_assert(sizeof(nvmlGpmMetric_t) == 40, "c_nvmlGpmMetric_t");

/* c_nvmlGpmMetricsGet_t. Only `numMetrics` of the metrics are looked at, so that callers made for other lengths of
 * the array work; this length is NVML_GPM_METRIC_MAX of pynvml. */
typedef struct {
	unsigned int version;
	unsigned int numMetrics;
	nvmlGpmSample_t sample1;
	nvmlGpmSample_t sample2;
	nvmlGpmMetric_t metrics[477];
} nvmlGpmMetricsGet_t;
static_assert(sizeof(nvmlGpmMetricsGet_t) == 19104, "c_nvmlGpmMetricsGet_t");

/* c_nvmlGpmSupport_t */
typedef struct {
	unsigned int version;
	unsigned int isSupportedDevice;
} nvmlGpmSupport_t;
static_assert(sizeof(nvmlGpmSupport_t) == 8, "c_nvmlGpmSupport_t");
