/* Calls the model 'probe' with its input, waits for the response, and returns it; counts calls in a metric. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "triton/core/tritonbackend.h"

#define EXPORT __attribute__((visibility("default")))
#define TRY(call)                            \
  do {                                       \
    TRITONSERVER_Error* failed = (call);     \
    if (failed != NULL) return failed;       \
  } while (0)

typedef struct {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  TRITONSERVER_InferenceResponse* response;
  bool done, released;
} call_t;

static TRITONSERVER_ResponseAllocator* allocator;
static TRITONSERVER_Metric* calls;

static TRITONSERVER_Error* allocate(
    TRITONSERVER_ResponseAllocator* from, const char* name, size_t size, TRITONSERVER_MemoryType preferred,
    int64_t preferred_id, void* userp, void** buffer, void** buffer_userp, TRITONSERVER_MemoryType* type,
    int64_t* id) {
  (void)from, (void)name, (void)preferred, (void)preferred_id, (void)userp;
  *buffer = size ? malloc(size) : NULL;
  *buffer_userp = NULL;
  *type = TRITONSERVER_MEMORY_CPU;
  *id = 0;
  return NULL;
}

static TRITONSERVER_Error* give_back(
    TRITONSERVER_ResponseAllocator* from, void* buffer, void* buffer_userp, size_t size,
    TRITONSERVER_MemoryType type, int64_t id) {
  (void)from, (void)buffer_userp, (void)size, (void)type, (void)id;
  free(buffer);
  return NULL;
}

static void released(TRITONSERVER_InferenceRequest* request, const uint32_t flags, void* userp) {
  (void)flags;
  call_t* call = userp;
  TRITONSERVER_InferenceRequestDelete(request);
  pthread_mutex_lock(&call->lock);
  call->released = true;
  pthread_cond_signal(&call->changed);
  pthread_mutex_unlock(&call->lock);
}

static void responded(TRITONSERVER_InferenceResponse* response, const uint32_t flags, void* userp) {
  call_t* call = userp;
  pthread_mutex_lock(&call->lock);
  if (response != NULL) call->response = response;
  if (flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL) call->done = true;
  pthread_cond_signal(&call->changed);
  pthread_mutex_unlock(&call->lock);
}

EXPORT TRITONSERVER_Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend* backend) {
  (void)backend;
  TRITONSERVER_MetricFamily* family;
  TRY(TRITONSERVER_ResponseAllocatorNew(&allocator, allocate, give_back, NULL));
  TRY(TRITONSERVER_MetricFamilyNew(&family, TRITONSERVER_METRIC_KIND_COUNTER, "talk_calls", "Calls."));
  TRITONSERVER_Parameter* label = TRITONSERVER_ParameterNew("to", TRITONSERVER_PARAMETER_STRING, "probe");
  const TRITONSERVER_Parameter* labels[] = {label};
  TRITONSERVER_Error* failed = TRITONSERVER_MetricNew(&calls, family, labels, 1);
  TRITONSERVER_ParameterDelete(label);
  return failed;
}

static TRITONSERVER_Error* ask(
    TRITONBACKEND_ModelInstance* instance, const void* data, uint64_t size, const int64_t* dims, uint32_t rank,
    call_t* call) {
  TRITONBACKEND_Model* model;
  TRITONSERVER_Server* server;
  TRITONSERVER_InferenceRequest* request;
  uint32_t flags;
  TRY(TRITONBACKEND_ModelInstanceModel(instance, &model));
  TRY(TRITONBACKEND_ModelServer(model, &server));
  TRY(TRITONSERVER_ServerModelTransactionProperties(server, "probe", -1, &flags, NULL));
  if (flags != TRITONSERVER_TXN_ONE_TO_ONE) return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INTERNAL, "decoupled");
  TRY(TRITONSERVER_InferenceRequestNew(&request, server, "probe", -1));
  TRY(TRITONSERVER_InferenceRequestAddInput(request, "IN", TRITONSERVER_TYPE_UINT8, dims, rank));
  TRY(TRITONSERVER_InferenceRequestAppendInputData(request, "IN", data, size, TRITONSERVER_MEMORY_CPU, 0));
  TRY(TRITONSERVER_InferenceRequestAddRequestedOutput(request, "OUT"));
  TRY(TRITONSERVER_InferenceRequestSetReleaseCallback(request, released, call));
  TRY(TRITONSERVER_InferenceRequestSetResponseCallback(request, allocator, NULL, responded, call));
  TRY(TRITONSERVER_ServerInferAsync(server, request, NULL));
  TRY(TRITONSERVER_MetricIncrement(calls, 1));
  pthread_mutex_lock(&call->lock);
  while (!call->done || !call->released) pthread_cond_wait(&call->changed, &call->lock);
  pthread_mutex_unlock(&call->lock);
  return TRITONSERVER_InferenceResponseError(call->response);
}

static TRITONSERVER_Error* run(TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request* request) {
  TRITONBACKEND_Input* input;
  TRITONBACKEND_Response* response;
  TRITONBACKEND_Output* output;
  TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
  TRITONSERVER_DataType datatype;
  int64_t id = 0;
  const int64_t* dims;
  const char* name;
  const void* data;
  void *buffer, *userp;
  uint64_t size, out_rank;
  size_t bytes;
  uint32_t rank;
  call_t call = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
  TRY(TRITONBACKEND_RequestInput(request, "IN", &input));
  TRY(TRITONBACKEND_InputProperties(input, NULL, NULL, &dims, &rank, NULL, NULL));
  TRY(TRITONBACKEND_InputBuffer(input, 0, &data, &size, &type, &id));
  TRITONSERVER_Error* asked = ask(instance, data, size, dims, rank, &call);
  TRY(TRITONBACKEND_ResponseNew(&response, request));
  if (asked == NULL) {
    TRY(TRITONSERVER_InferenceResponseOutput(
        call.response, 0, &name, &datatype, &dims, &out_rank, &data, &bytes, &type, &id, &userp));
    TRY(TRITONBACKEND_ResponseOutput(response, &output, "OUT", datatype, dims, (uint32_t)out_rank));
    TRY(TRITONBACKEND_OutputBuffer(output, &buffer, bytes, &type, &id));
    memcpy(buffer, data, bytes);
  }
  if (call.response != NULL) TRY(TRITONSERVER_InferenceResponseDelete(call.response));
  TRY(TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, asked));
  TRITONSERVER_ErrorDelete(asked);
  return TRITONBACKEND_RequestRelease(request, TRITONSERVER_REQUEST_RELEASE_ALL);
}

EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t count) {
  for (uint32_t i = 0; i < count; i++) TRY(run(instance, requests[i]));
  return NULL;
}
