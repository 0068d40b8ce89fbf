/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in's answers about utilisation, memory, power, clocks, links, errors, and NVML's numbered fields. */
#include "nvml_script.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

#define SLOTS FIRST_SLOT(1)

#define LONG_NUMBER(function, key, kind)                                                                               \
	EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned long long *to)                                      \
	{                                                                                                              \
		BEGIN(device, kind);                                                                                   \
		return number(device, key, to);                                                                        \
	}                                                                                                              \
	static_assert(1, "")

EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *to)
{
	nvmlReturn_t result;

	BEGIN(device, NOT_IN_MIG);
	if (!to)
		return NVML_ERROR_INVALID_ARGUMENT;
	result = small_number(device, "utilization", &to->gpu);
	return result == NVML_SUCCESS ? small_number(device, "memory_utilization", &to->memory) : result;
}

static nvmlReturn_t memory(nvmlDevice_t device, nvmlMemory_v2_t *to)
{
	nvmlReturn_t result = number(device, "memory_total", &to->total);

	if (result == NVML_SUCCESS)
		result = number(device, "memory_used", &to->used);
	if (result != NVML_SUCCESS)
		return result;
	to->reserved = number_or(device, "memory_reserved", 0);
	to->free = number_or(device, "memory_free", to->total - to->used - to->reserved);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *to)
{
	nvmlMemory_v2_t all = {0};
	nvmlReturn_t result;

	BEGIN(device, ANY);
	if (!to)
		return NVML_ERROR_INVALID_ARGUMENT;
	result = memory(device, &all);
	/* What is reserved counts as used here. */
	if (result == NVML_SUCCESS)
		*to = (nvmlMemory_t){all.total, all.free, all.used + all.reserved};
	return result;
}

#ifndef OLD_DRIVER
EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *to)
{
	BEGIN(device, ANY);
	if (!to)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (to->version != NVML_MEMORY_V2)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	return memory(device, to);
}
#endif

NUMBER(nvmlDeviceGetPowerUsage, "power_mw", WHOLE);
NUMBER(nvmlDeviceGetEnforcedPowerLimit, "power_limit_mw", WHOLE);
NUMBER(nvmlDeviceGetPowerManagementLimit, "power_limit_mw", WHOLE);
LONG_NUMBER(nvmlDeviceGetTotalEnergyConsumption, "energy_mj", WHOLE);
LONG_NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, "throttle_reasons", WHOLE);
#ifndef OLD_DRIVER
LONG_NUMBER(nvmlDeviceGetCurrentClocksEventReasons, "throttle_reasons", WHOLE);
#endif

EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned int sensor, unsigned int *to)
{
	BEGIN(device, WHOLE);
	return sensor ? NVML_ERROR_INVALID_ARGUMENT : small_number(device, "temperature_c", to);
}

#ifndef OLD_DRIVER
EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_v1_t *to)
{
	BEGIN(device, WHOLE);
	if (!to || to->sensorType)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (to->version != NVML_TEMPERATURE_V1)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	return small_number(device, "temperature_c", (unsigned int *)&to->temperature);
}
#endif

static nvmlReturn_t clock_of(nvmlDevice_t device, const char *prefix, unsigned int type, unsigned int *to)
{
	static const char *const names[] = {"graphics", "sm", "memory", "video"};
	char key[32];

	if (type >= 4)
		return NVML_ERROR_INVALID_ARGUMENT;
	snprintf(key, sizeof(key), "%s_%s", prefix, names[type]);
	return small_number(device, key, to);
}

EXPORT nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned int type, unsigned int *to)
{
	BEGIN(device, WHOLE);
	return clock_of(device, "clock", type, to);
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned int type, unsigned int *to)
{
	BEGIN(device, WHOLE);
	return clock_of(device, "clock_max", type, to);
}

/* ---- PCIe, NVLink, ECC */

EXPORT nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, unsigned int counter, unsigned int *to)
{
	BEGIN(device, WHOLE);
	return counter > 1 ? NVML_ERROR_INVALID_ARGUMENT
			   : small_number(device, counter ? "pcie_rx_kbps" : "pcie_tx_kbps", to);
}

NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_generation", WHOLE);
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width", WHOLE);
NUMBER(nvmlDeviceGetPcieReplayCounter, "pcie_replays", WHOLE);

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, unsigned int *active)
{
	unsigned long long links;
	nvmlReturn_t result;

	BEGIN(device, WHOLE);
	result = number(device, "nvlinks", &links);
	if (result != NVML_SUCCESS)
		return result;
	if (!active || link >= links)
		return NVML_ERROR_INVALID_ARGUMENT;
	*active = !(number_or(device, "nvlinks_down", 0) >> link & 1);
	return NVML_SUCCESS;
}

static const char *ecc_key(unsigned int uncorrected, unsigned int lifetime)
{
	static const char *const keys[2][2] = {{"ecc_corrected", "ecc_corrected_lifetime"},
					       {"ecc_uncorrected", "ecc_uncorrected_lifetime"}};

	return keys[uncorrected][lifetime];
}

EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned int uncorrected, unsigned int lifetime,
						unsigned long long *to)
{
	BEGIN(device, WHOLE);
	if (uncorrected > 1 || lifetime > 1)
		return NVML_ERROR_INVALID_ARGUMENT;
	return number(device, ecc_key(uncorrected, lifetime), to);
}

EXPORT nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
	nvmlReturn_t result;

	BEGIN(device, WHOLE);
	result = small_number(device, "ecc_mode", current);
	if (result == NVML_SUCCESS && pending)
		*pending = number_or(device, "ecc_mode_pending", *current);
	return result;
}

#ifndef OLD_DRIVER
EXPORT nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected,
					      unsigned int *pending, unsigned int *failure)
{
	nvmlReturn_t result;

	BEGIN(device, NOT_IN_MIG);
	if (!corrected || !uncorrected || !pending || !failure)
		return NVML_ERROR_INVALID_ARGUMENT;
	result = small_number(device, "remapped_corrected", corrected);
	*uncorrected = number_or(device, "remapped_uncorrected", 0);
	*pending = number_or(device, "remapping_pending", 0);
	*failure = number_or(device, "remapping_failed", 0);
	return result;
}
#endif

/* NVML_PERF_POLICY_*: 0 to 5, 10 and 11 */
static const char *const violations[] = {
	"violation_power",	     "violation_thermal",     "violation_sync_boost", "violation_board_limit",
	"violation_low_utilization", "violation_reliability", "violation_app_clocks", "violation_base_clocks",
};

EXPORT nvmlReturn_t nvmlDeviceGetViolationStatus(nvmlDevice_t device, unsigned int policy, nvmlViolationTime_t *to)
{
	BEGIN(device, WHOLE);
	if (!to || policy > 11 || (policy > 5 && policy < 10))
		return NVML_ERROR_INVALID_ARGUMENT;
	to->referenceTime = now_us();
	return number(device, violations[policy < 6 ? policy : policy - 4], &to->violationTime);
}

/* ---- fields */

#define FI_NVLINK_FIRST 138 /* NVML_FI_DEV_NVLINK_THROUGHPUT_* */
#define FI_NVLINK_LAST 141
#define NONSENSE 0xdeadbeef00000000ULL

/* NVML_FI_DEV_* that are other names for what has a function or an attribute of its own. */
static const struct {
	uint32_t id;
	unsigned int type;
	const char *key;
} fields[] = {
	{1, TYPE_UINT, "ecc_mode"},
	{2, TYPE_UINT, "ecc_mode"},
	{3, TYPE_ULLONG, "ecc_corrected"},
	{4, TYPE_ULLONG, "ecc_uncorrected"},
	{5, TYPE_ULLONG, "ecc_corrected_lifetime"},
	{6, TYPE_ULLONG, "ecc_uncorrected_lifetime"},
	{74, TYPE_ULLONG, "violation_power"},
	{75, TYPE_ULLONG, "violation_thermal"},
	{76, TYPE_ULLONG, "violation_sync_boost"},
	{77, TYPE_ULLONG, "violation_board_limit"},
	{78, TYPE_ULLONG, "violation_low_utilization"},
	{79, TYPE_ULLONG, "violation_reliability"},
	{80, TYPE_ULLONG, "violation_app_clocks"},
	{81, TYPE_ULLONG, "violation_base_clocks"},
	{82, TYPE_UINT, "memory_temperature_c"},
	{83, TYPE_ULLONG, "energy_mj"},
	{91, TYPE_UINT, "nvlinks"},
	{94, TYPE_UINT, "pcie_replays"},
	{138, TYPE_ULLONG, "nvlink_tx_kib"},
	{139, TYPE_ULLONG, "nvlink_rx_kib"},
	{140, TYPE_ULLONG, "nvlink_raw_tx_kib"},
	{141, TYPE_ULLONG, "nvlink_raw_rx_kib"},
	{142, TYPE_UINT, "remapped_corrected"},
	{143, TYPE_UINT, "remapped_uncorrected"},
	{144, TYPE_UINT, "remapping_pending"},
	{145, TYPE_UINT, "remapping_failed"},
	{185, TYPE_UINT, "power_average_mw"},
	{186, TYPE_UINT, "power_mw"},
	{190, TYPE_UINT, "power_limit_mw"},
	{197, TYPE_ULLONG, "pcie_tx_bytes"},
	{198, TYPE_ULLONG, "pcie_rx_bytes"},
};

/* `double X`, `uint X`, `ulong X`, `sllong X`, `sint X`, `ushort X`, or `X` for unsigned long long */
static void typed(const char *text, nvmlFieldValue_t *to)
{
	static const char *const types[] = {"double", "uint", "ulong", "ullong", "sllong", "sint", "ushort"};
	const char *value = strchr(text, ' ');

	to->valueType = TYPE_ULLONG;
	for (unsigned int type = 0; value && type < sizeof(types) / sizeof(*types); type++)
		if (!strncmp(text, types[type], value - text))
			to->valueType = type;
	value = value ? value + 1 : text;
	if (to->valueType == TYPE_DOUBLE)
		sscanf(value, "%lf", &to->value.dVal);
	else if (value[0] == '-')
		sscanf(value, "%lld", &to->value.sllVal);
	else
		sscanf(value, "%llu", &to->value.ullVal);
}

/* A field that the script gives by another name. */
static nvmlReturn_t named_field(nvmlDevice_t device, unsigned int type, const char *key, nvmlFieldValue_t *to)
{
	unsigned long long value, links;
	nvmlReturn_t result = number(device, key, &value);

	if (result != NVML_SUCCESS)
		return result;
	/* Of these the scope is a link, or all ones for the sum of all. */
	if (to->fieldId >= FI_NVLINK_FIRST && to->fieldId <= FI_NVLINK_LAST && to->scopeId != UINT_MAX) {
		links = number_or(device, "nvlinks", 0);
		if (to->scopeId >= links)
			return NVML_ERROR_INVALID_ARGUMENT;
		value /= links;
	}
	to->valueType = type;
	/* Only the member that the type names is to be read, so the rest of the union is nonsense. */
	to->value.ullVal = type == TYPE_UINT ? NONSENSE | (unsigned int)value : value;
	return NVML_SUCCESS;
}

static nvmlReturn_t field(nvmlDevice_t device, nvmlFieldValue_t *to)
{
	const char *value;
	char key[48];

	snprintf(key, sizeof(key), "field.%u.%u", to->fieldId, to->scopeId);
	value = attribute(device, key);
	if (value && error_in(value) == NVML_SUCCESS)
		typed(value, to);
	if (value)
		return error_in(value);
	for (unsigned int i = 0; i < sizeof(fields) / sizeof(*fields); i++)
		if (fields[i].id == to->fieldId)
			return named_field(device, fields[i].type, fields[i].key, to);
	return NVML_ERROR_NOT_SUPPORTED;
}

EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
	BEGIN(device, ANY);
	if (count <= 0 || !values)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (int i = 0; i < count; i++) {
		values[i].timestamp = now_us();
		values[i].latencyUsec = 0;
		values[i].value.ullVal = 0;
		values[i].nvmlReturn = field(device, &values[i]);
	}
	return NVML_SUCCESS;
}

NO_MORE_SLOTS;
