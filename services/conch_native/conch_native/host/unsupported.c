/* Functions that conch does not provide: programs with a server inside, and caches. Each answers
 * UNSUPPORTED and says its name, so that a library which only links to it loads. */
#include "internal.h"
#include "triton/core/tritoncache.h"
#include "triton/core/tritonrepoagent.h"

#pragma GCC diagnostic ignored "-Wunused-parameter"

TRITONSERVER_Error* TRITONSERVER_InferenceRequestAddRawInput(
    TRITONSERVER_InferenceRequest* request, const char* name) {
  return conch_unsupported("TRITONSERVER_InferenceRequestAddRawInput");
}
TRITONSERVER_Error* TRITONSERVER_InferenceResponseOutputClassificationLabel(
    TRITONSERVER_InferenceResponse* response, uint32_t index, size_t class_index, const char** label) {
  return conch_unsupported("TRITONSERVER_InferenceResponseOutputClassificationLabel");
}
TRITONSERVER_Error* TRITONSERVER_InferenceTraceNew(
    TRITONSERVER_InferenceTrace** trace, TRITONSERVER_InferenceTraceLevel level, uint64_t parent_id,
    TRITONSERVER_InferenceTraceActivityFn_t activity_fn, TRITONSERVER_InferenceTraceReleaseFn_t release_fn,
    void* trace_userp) {
  return conch_unsupported("TRITONSERVER_InferenceTraceNew");
}
TRITONSERVER_Error* TRITONSERVER_InferenceTraceTensorNew(
    TRITONSERVER_InferenceTrace** trace, TRITONSERVER_InferenceTraceLevel level, uint64_t parent_id,
    TRITONSERVER_InferenceTraceActivityFn_t activity_fn, TRITONSERVER_InferenceTraceTensorActivityFn_t
    tensor_activity_fn, TRITONSERVER_InferenceTraceReleaseFn_t release_fn, void* trace_userp) {
  return conch_unsupported("TRITONSERVER_InferenceTraceTensorNew");
}
TRITONSERVER_Error* TRITONSERVER_ServerNew(TRITONSERVER_Server** server, TRITONSERVER_ServerOptions* options) {
  return conch_unsupported("TRITONSERVER_ServerNew");
}
TRITONSERVER_Error* TRITONSERVER_ServerDelete(TRITONSERVER_Server* server) {
  return conch_unsupported("TRITONSERVER_ServerDelete");
}
TRITONSERVER_Error* TRITONSERVER_ServerStop(TRITONSERVER_Server* server) {
  return conch_unsupported("TRITONSERVER_ServerStop");
}
TRITONSERVER_Error* TRITONSERVER_ServerSetExitTimeout(TRITONSERVER_Server* server, unsigned int timeout) {
  return conch_unsupported("TRITONSERVER_ServerSetExitTimeout");
}
TRITONSERVER_Error* TRITONSERVER_ServerRegisterModelRepository(
    TRITONSERVER_Server* server, const char* repository_path, const TRITONSERVER_Parameter** parameters,
    uint32_t mapping_count) {
  return conch_unsupported("TRITONSERVER_ServerRegisterModelRepository");
}
TRITONSERVER_Error* TRITONSERVER_ServerUnregisterModelRepository(
    TRITONSERVER_Server* server, const char* repository_path) {
  return conch_unsupported("TRITONSERVER_ServerUnregisterModelRepository");
}
TRITONSERVER_Error* TRITONSERVER_ServerPollModelRepository(TRITONSERVER_Server* server) {
  return conch_unsupported("TRITONSERVER_ServerPollModelRepository");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsNew(TRITONSERVER_ServerOptions** options) {
  return conch_unsupported("TRITONSERVER_ServerOptionsNew");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsDelete(
    TRITONSERVER_ServerOptions* options, TRITONSERVER_ServerOptions* options2) {
  return conch_unsupported("TRITONSERVER_ServerOptionsDelete");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetServerId(
    TRITONSERVER_ServerOptions* options, const char* server_id) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetServerId");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetModelRepositoryPath(
    TRITONSERVER_ServerOptions* options, const char* model_repository_path) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetModelRepositoryPath");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetModelControlMode(
    TRITONSERVER_ServerOptions* options, TRITONSERVER_ModelControlMode mode) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetModelControlMode");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetStartupModel(
    TRITONSERVER_ServerOptions* options, const char* model) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetStartupModel");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetStrictModelConfig(
    TRITONSERVER_ServerOptions* options, bool strict) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetStrictModelConfig");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetModelConfigName(
    TRITONSERVER_ServerOptions* options, const char* model_config_name) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetModelConfigName");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetRateLimiterMode(
    TRITONSERVER_ServerOptions* options, TRITONSERVER_RateLimitMode mode) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetRateLimiterMode");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsAddRateLimiterResource(
    TRITONSERVER_ServerOptions* options, const char* resource_name, size_t resource_count, int device) {
  return conch_unsupported("TRITONSERVER_ServerOptionsAddRateLimiterResource");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetPinnedMemoryPoolByteSize(
    TRITONSERVER_ServerOptions* options, uint64_t size) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetPinnedMemoryPoolByteSize");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetCudaMemoryPoolByteSize(
    TRITONSERVER_ServerOptions* options, int gpu_device, uint64_t size) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetCudaMemoryPoolByteSize");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetCudaVirtualAddressSize(
    TRITONSERVER_ServerOptions* options, int gpu_device, size_t cuda_virtual_address_size) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetCudaVirtualAddressSize");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetResponseCacheByteSize(
    TRITONSERVER_ServerOptions* options, uint64_t size) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetResponseCacheByteSize");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetCacheConfig(
    TRITONSERVER_ServerOptions* options, const char* cache_name, const char* config_json) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetCacheConfig");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetCacheDirectory(
    TRITONSERVER_ServerOptions* options, const char* cache_dir) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetCacheDirectory");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetMinSupportedComputeCapability(
    TRITONSERVER_ServerOptions* options, double cc) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetMinSupportedComputeCapability");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetExitOnError(TRITONSERVER_ServerOptions* options, bool exit) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetExitOnError");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetStrictReadiness(
    TRITONSERVER_ServerOptions* options, bool strict) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetStrictReadiness");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetExitTimeout(
    TRITONSERVER_ServerOptions* options, unsigned int timeout) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetExitTimeout");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetBufferManagerThreadCount(
    TRITONSERVER_ServerOptions* options, unsigned int thread_count) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetBufferManagerThreadCount");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetModelLoadThreadCount(
    TRITONSERVER_ServerOptions* options, unsigned int thread_count) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetModelLoadThreadCount");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetModelLoadRetryCount(
    TRITONSERVER_ServerOptions* options, unsigned int retry_count) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetModelLoadRetryCount");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetModelNamespacing(
    TRITONSERVER_ServerOptions* options, bool enable_namespace) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetModelNamespacing");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetEnablePeerAccess(
    TRITONSERVER_ServerOptions* options, bool enable_peer_access) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetEnablePeerAccess");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetLogFile(
    TRITONSERVER_ServerOptions* options, const char* file) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetLogFile");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetLogInfo(TRITONSERVER_ServerOptions* options, bool log) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetLogInfo");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetLogWarn(TRITONSERVER_ServerOptions* options, bool log) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetLogWarn");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetLogError(TRITONSERVER_ServerOptions* options, bool log) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetLogError");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetLogFormat(
    TRITONSERVER_ServerOptions* options, TRITONSERVER_LogFormat format) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetLogFormat");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetLogVerbose(TRITONSERVER_ServerOptions* options, int level) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetLogVerbose");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetMetrics(TRITONSERVER_ServerOptions* options, bool metrics) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetMetrics");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetGpuMetrics(
    TRITONSERVER_ServerOptions* options, bool gpu_metrics) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetGpuMetrics");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetCpuMetrics(
    TRITONSERVER_ServerOptions* options, bool cpu_metrics) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetCpuMetrics");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetMetricsInterval(
    TRITONSERVER_ServerOptions* options, uint64_t metrics_interval_ms) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetMetricsInterval");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetBackendDirectory(
    TRITONSERVER_ServerOptions* options, const char* backend_dir) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetBackendDirectory");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetRepoAgentDirectory(
    TRITONSERVER_ServerOptions* options, const char* repoagent_dir) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetRepoAgentDirectory");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetModelLoadDeviceLimit(
    TRITONSERVER_ServerOptions* options, TRITONSERVER_InstanceGroupKind kind, int device_id, double
    fraction) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetModelLoadDeviceLimit");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetBackendConfig(
    TRITONSERVER_ServerOptions* options, const char* backend_name, const char* setting, const char* value) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetBackendConfig");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetHostPolicy(
    TRITONSERVER_ServerOptions* options, const char* policy_name, const char* setting, const char* value) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetHostPolicy");
}
TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetMetricsConfig(
    TRITONSERVER_ServerOptions* options, const char* name, const char* setting, const char* value) {
  return conch_unsupported("TRITONSERVER_ServerOptionsSetMetricsConfig");
}
TRITONSERVER_Error* TRITONCACHE_CacheEntryBufferCount(TRITONCACHE_CacheEntry* entry, size_t* count) {
  return conch_unsupported("TRITONCACHE_CacheEntryBufferCount");
}
TRITONSERVER_Error* TRITONCACHE_CacheEntryAddBuffer(
    TRITONCACHE_CacheEntry* entry, void* base, TRITONSERVER_BufferAttributes* attributes) {
  return conch_unsupported("TRITONCACHE_CacheEntryAddBuffer");
}
TRITONSERVER_Error* TRITONCACHE_CacheEntryGetBuffer(
    TRITONCACHE_CacheEntry* entry, size_t index, void** base, TRITONSERVER_BufferAttributes* attributes) {
  return conch_unsupported("TRITONCACHE_CacheEntryGetBuffer");
}
TRITONSERVER_Error* TRITONCACHE_CacheEntrySetBuffer(
    TRITONCACHE_CacheEntry* entry, size_t index, void* new_base, TRITONSERVER_BufferAttributes* attributes) {
  return conch_unsupported("TRITONCACHE_CacheEntrySetBuffer");
}
TRITONSERVER_Error* TRITONCACHE_Copy(TRITONCACHE_Allocator* allocator, TRITONCACHE_CacheEntry* entry) {
  return conch_unsupported("TRITONCACHE_Copy");
}
