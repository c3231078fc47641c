/* Calls the model "inner" with its inputs, and answers with the responses, whose parameters say what the server says
 * of that model. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "triton/core/tritonbackend.h"

#define TRY(call)                              \
  do {                                         \
    TRITONSERVER_Error* tried = (call);        \
    if (tried != NULL) return tried;           \
  } while (0)

typedef struct {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  TRITONSERVER_InferenceResponse* response;
  bool released, ended;
} call_t;

static TRITONSERVER_ResponseAllocator* allocator;

static TRITONSERVER_Error* give(
    TRITONSERVER_ResponseAllocator* from, const char* name, size_t size, TRITONSERVER_MemoryType preferred,
    int64_t preferred_id, void* userp, void** buffer, void** buffer_userp, TRITONSERVER_MemoryType* actual,
    int64_t* actual_id) {
  (void)from, (void)name, (void)preferred, (void)preferred_id, (void)userp;
  *buffer = size ? malloc(size) : NULL;
  *buffer_userp = NULL;
  *actual = TRITONSERVER_MEMORY_CPU;
  *actual_id = 0;
  return NULL;
}

static TRITONSERVER_Error* take(
    TRITONSERVER_ResponseAllocator* from, void* buffer, void* buffer_userp, size_t size,
    TRITONSERVER_MemoryType type, int64_t id) {
  (void)from, (void)buffer_userp, (void)size, (void)type, (void)id;
  free(buffer);
  return NULL;
}

static void on_release(TRITONSERVER_InferenceRequest* request, const uint32_t flags, void* userp) {
  (void)flags;
  call_t* call = userp;
  TRITONSERVER_ErrorDelete(TRITONSERVER_InferenceRequestDelete(request));
  pthread_mutex_lock(&call->lock);
  call->released = true;
  pthread_cond_signal(&call->changed);
  pthread_mutex_unlock(&call->lock);
}

static void on_response(TRITONSERVER_InferenceResponse* response, const uint32_t flags, void* userp) {
  call_t* call = userp;
  pthread_mutex_lock(&call->lock);
  if (response != NULL) call->response = response;
  call->ended = (flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL) != 0;
  pthread_cond_signal(&call->changed);
  pthread_mutex_unlock(&call->lock);
}

TRITONSERVER_Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend* backend) {
  (void)backend;
  return TRITONSERVER_ResponseAllocatorNew(&allocator, give, take, NULL);
}

/* Adds a message as a parameter. */
static TRITONSERVER_Error* tell(TRITONBACKEND_Response* response, const char* name, TRITONSERVER_Message* message) {
  const char* text;
  size_t size;
  TRY(TRITONSERVER_MessageSerializeToJson(message, &text, &size));
  char* copy = strndup(text, size);
  TRITONSERVER_Error* error = TRITONBACKEND_ResponseSetStringParameter(response, name, copy);
  free(copy);
  TRITONSERVER_ErrorDelete(TRITONSERVER_MessageDelete(message));
  return error;
}

static TRITONSERVER_Error* inner(
    TRITONSERVER_Server* server, TRITONBACKEND_Request* request, TRITONBACKEND_Response* response) {
  call_t call = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, false, false};
  TRITONBACKEND_Input* input;
  const char *name, *id;
  TRITONSERVER_DataType datatype;
  const int64_t* dims;
  uint32_t rank, flags;
  uint64_t size;
  const void* data;
  void* to;
  TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
  int64_t device = 0;
  TRY(TRITONBACKEND_RequestInput(request, "IN", &input));
  TRY(TRITONBACKEND_InputProperties(input, &name, &datatype, &dims, &rank, &size, NULL));
  TRY(TRITONBACKEND_InputBuffer(input, 0, &data, &size, &type, &device));
  TRITONSERVER_InferenceRequest* inference;
  TRY(TRITONSERVER_InferenceRequestNew(&inference, server, "inner", -1));
  TRY(TRITONBACKEND_RequestId(request, &id));
  TRY(TRITONSERVER_InferenceRequestSetId(inference, id));
  TRY(TRITONSERVER_InferenceRequestAddInput(inference, "IN", datatype, dims, rank));
  size_t half = size / 2; /* in two pieces */
  TRY(TRITONSERVER_InferenceRequestAppendInputData(inference, "IN", data, half, type, device));
  TRY(TRITONSERVER_InferenceRequestAppendInputData(
      inference, "IN", (const char*)data + half, size - half, type, device));
  TRY(TRITONSERVER_InferenceRequestAddRequestedOutput(inference, "OUT"));
  TRY(TRITONSERVER_InferenceRequestSetReleaseCallback(inference, on_release, &call));
  TRY(TRITONSERVER_InferenceRequestSetResponseCallback(inference, allocator, NULL, on_response, &call));
  TRY(TRITONSERVER_ServerInferAsync(server, inference, NULL));
  pthread_mutex_lock(&call.lock);
  while (!call.released || !call.ended) pthread_cond_wait(&call.changed, &call.lock);
  pthread_mutex_unlock(&call.lock);
  if (call.response == NULL) return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INTERNAL, "no response");
  TRITONSERVER_Error* error = TRITONSERVER_InferenceResponseError(call.response);
  if (error == NULL) {
    uint64_t out_rank;
    const void* base;
    void* userp;
    TRITONBACKEND_Output* output;
    TRY(TRITONSERVER_InferenceResponseOutput(
        call.response, 0, &name, &datatype, &dims, &out_rank, &base, &size, &type, &device, &userp));
    TRY(TRITONBACKEND_ResponseOutput(response, &output, "OUT", datatype, dims, (uint32_t)out_rank));
    TRY(TRITONBACKEND_OutputBuffer(output, &to, size, &type, &device));
    memcpy(to, base, size);
    TRY(TRITONSERVER_ServerModelTransactionProperties(server, "inner", -1, &flags, NULL));
    TRY(TRITONBACKEND_ResponseSetIntParameter(response, "transaction", flags));
    TRITONSERVER_Message* message;
    TRY(TRITONSERVER_ServerModelConfig(server, "inner", -1, 1, &message));
    TRY(tell(response, "config", message));
    TRY(TRITONSERVER_ServerModelMetadata(server, "inner", -1, &message));
    TRY(tell(response, "metadata", message));
  }
  TRITONSERVER_ErrorDelete(TRITONSERVER_InferenceResponseDelete(call.response));
  return error;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t count) {
  TRITONBACKEND_Model* model;
  TRITONSERVER_Server* server;
  TRY(TRITONBACKEND_ModelInstanceModel(instance, &model));
  TRY(TRITONBACKEND_ModelServer(model, &server));
  for (uint32_t i = 0; i < count; i++) {
    TRITONBACKEND_Response* response;
    TRITONSERVER_ErrorDelete(TRITONBACKEND_ResponseNew(&response, requests[i]));
    TRITONSERVER_Error* error = inner(server, requests[i], response);
    TRITONSERVER_ErrorDelete(
        TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, error));
    TRITONSERVER_ErrorDelete(error);
    TRITONSERVER_ErrorDelete(TRITONBACKEND_RequestRelease(requests[i], TRITONSERVER_REQUEST_RELEASE_ALL));
  }
  return NULL;
}
