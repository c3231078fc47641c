/* A backend that does what its input says by its first byte, and returns its input as its output:
 *
 *   E  Execute fails
 *   R  the response is an error
 *   C  it writes to address 0
 *   M  it waits until another instance executes an M
 *   L  it logs, and counts in the metric probe_letters{letter="L"}
 *   T  it reports an activity at 17 ns, if the request is traced
 *   anything else: nothing more
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "triton/core/tritonbackend.h"

#define EXPORT __attribute__((visibility("default")))
#define TRY(call)                            \
  do {                                       \
    TRITONSERVER_Error* failed = (call);     \
    if (failed != NULL) return failed;       \
  } while (0)

static const char CONFIG[] =
    "{\"max_batch_size\":8,\"input\":[{\"name\":\"IN\",\"data_type\":\"TYPE_UINT8\",\"dims\":[-1]}],"
    "\"output\":[{\"name\":\"OUT\",\"data_type\":\"TYPE_UINT8\",\"dims\":[-1]},"
    "{\"name\":\"BATCH\",\"data_type\":\"TYPE_INT32\",\"dims\":[1]}],"
    "\"dynamic_batching\":{\"max_queue_delay_microseconds\":1000}}";

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t met = PTHREAD_COND_INITIALIZER;
static int meeting;
static TRITONSERVER_Metric* letters;

EXPORT TRITONSERVER_Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend* backend) {
  uint32_t major, minor;
  TRY(TRITONBACKEND_ApiVersion(&major, &minor));
  if (major != TRITONBACKEND_API_VERSION_MAJOR || minor < 10)
    return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_UNSUPPORTED, "triton backend API version does not support this");
  (void)backend;
  TRITONSERVER_MetricFamily* family;
  TRY(TRITONSERVER_MetricFamilyNew(&family, TRITONSERVER_METRIC_KIND_COUNTER, "probe_letters", "Letters."));
  TRITONSERVER_Parameter* label = TRITONSERVER_ParameterNew("letter", TRITONSERVER_PARAMETER_STRING, "L");
  TRY(TRITONSERVER_MetricNew(&letters, family, (const TRITONSERVER_Parameter*[]){label}, 1));
  TRITONSERVER_ParameterDelete(label);
  return TRITONSERVER_LogMessage(TRITONSERVER_LOG_INFO, "probe.c", __LINE__, "the probe is there");
}

EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model) {
  bool completes;
  TRY(TRITONBACKEND_ModelAutoCompleteConfig(model, &completes));
  TRITONSERVER_Message* config;
  const char* text;
  size_t size;
  TRY(TRITONBACKEND_ModelConfig(model, 1, &config));
  TRY(TRITONSERVER_MessageSerializeToJson(config, &text, &size));
  bool whole = strstr(text, "\"IN\"") != NULL;
  TRITONSERVER_MessageDelete(config);
  if (!completes || whole) return NULL;
  TRY(TRITONSERVER_MessageNewFromSerializedJson(&config, CONFIG, strlen(CONFIG)));
  TRITONSERVER_Error* failed = TRITONBACKEND_ModelSetConfig(model, 1, config);
  TRITONSERVER_MessageDelete(config);
  return failed;
}

static TRITONSERVER_Error* meet(void) {
  struct timespec end;
  clock_gettime(CLOCK_REALTIME, &end);
  end.tv_sec += 60;
  int failed = 0;
  pthread_mutex_lock(&lock);
  meeting++;
  pthread_cond_broadcast(&met);
  while (meeting < 2 && failed == 0) failed = pthread_cond_timedwait(&met, &lock, &end);
  pthread_mutex_unlock(&lock);
  return failed == 0 ? NULL : TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_UNAVAILABLE, "nothing else executes");
}

static TRITONSERVER_Error* answer(
    TRITONBACKEND_Request* request, const char* data, uint64_t size, const int64_t* dims, uint32_t rank,
    int32_t count) {
  TRITONBACKEND_Response* response;
  TRITONBACKEND_Output* output;
  TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
  int64_t id = 0;
  void* buffer;
  TRY(TRITONBACKEND_ResponseNew(&response, request));
  TRITONSERVER_Error* error = NULL;
  if (size && data[0] == 'R') {
    error = TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_NOT_FOUND, "the input has an R");
  } else {
    TRY(TRITONBACKEND_ResponseOutput(response, &output, "OUT", TRITONSERVER_TYPE_UINT8, dims, rank));
    TRY(TRITONBACKEND_OutputBuffer(output, &buffer, size, &type, &id));
    memcpy(buffer, data, size);
    int64_t one[] = {1, 1};
    TRY(TRITONBACKEND_ResponseOutput(response, &output, "BATCH", TRITONSERVER_TYPE_INT32, one, 2));
    TRY(TRITONBACKEND_OutputBuffer(output, &buffer, sizeof count, &type, &id));
    memcpy(buffer, &count, sizeof count);
    TRY(TRITONBACKEND_ResponseSetStringParameter(response, "by", "probe"));
  }
  TRY(TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, error));
  TRITONSERVER_ErrorDelete(error);
  return NULL;
}

EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t count) {
  (void)instance;
  for (uint32_t i = 0; i < count; i++) {
    TRITONBACKEND_Input* input;
    const char* name;
    const void* data;
    const int64_t* dims;
    uint64_t size;
    uint32_t rank;
    TRITONSERVER_DataType datatype;
    TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
    int64_t id = 0;
    TRY(TRITONBACKEND_RequestInput(requests[i], "IN", &input));
    TRY(TRITONBACKEND_InputProperties(input, &name, &datatype, &dims, &rank, &size, NULL));
    TRY(TRITONBACKEND_InputBuffer(input, 0, &data, &size, &type, &id));
    char what = size ? *(const char*)data : ' ';
    if (what == 'E') return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INVALID_ARG, "the input has an E");
    if (what == 'C') *(volatile int*)0 = 1;
    if (what == 'M') TRY(meet());
    if (what == 'L') {
      TRY(TRITONSERVER_LogMessage(TRITONSERVER_LOG_WARN, "probe.c", __LINE__, "the input has an L"));
      TRY(TRITONSERVER_MetricIncrement(letters, 1));
    }
    if (what == 'T') {
      TRITONSERVER_InferenceTrace* trace;
      TRY(TRITONBACKEND_RequestTrace(requests[i], &trace));
      if (trace != NULL) TRY(TRITONSERVER_InferenceTraceReportActivity(trace, 17, "probed"));
    }
    TRY(answer(requests[i], data, size, dims, rank, (int32_t)count));
  }
  for (uint32_t i = 0; i < count; i++)
    TRY(TRITONBACKEND_RequestRelease(requests[i], TRITONSERVER_REQUEST_RELEASE_ALL));
  return NULL;
}
