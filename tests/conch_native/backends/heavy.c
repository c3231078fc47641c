/* Responds with as many bytes as IN says: in a parameter, or without one in an output that is left as it is. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "triton/core/tritonbackend.h"

#define TRY(call)                              \
  do {                                         \
    TRITONSERVER_Error* tried = (call);        \
    if (tried != NULL) return tried;           \
  } while (0)

/* IN: bytes, responses (0: one, in Execute, with a parameter). */
typedef struct {
  TRITONBACKEND_ResponseFactory* factory;
  int64_t bytes, count;
} job_t;

/* The responses that were sent. */
__attribute__((visibility("default"))) atomic_long heavy_sent;

static TRITONSERVER_Error* respond(TRITONBACKEND_Response* response, int64_t bytes) {
  TRITONBACKEND_Output* output;
  void* buffer;
  TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
  int64_t id = 0;
  TRY(TRITONBACKEND_ResponseOutput(response, &output, "OUT", TRITONSERVER_TYPE_UINT8, &bytes, 1));
  return TRITONBACKEND_OutputBuffer(output, &buffer, (uint64_t)bytes, &type, &id);
}

static void* send_all(void* given) {
  job_t* job = given;
  for (int64_t i = 0; i < job->count; i++) {
    TRITONBACKEND_Response* response;
    TRITONSERVER_ErrorDelete(TRITONBACKEND_ResponseNewFromFactory(&response, job->factory));
    TRITONSERVER_ErrorDelete(respond(response, job->bytes));
    TRITONSERVER_ErrorDelete(TRITONBACKEND_ResponseSend(response, 0, NULL));
    atomic_fetch_add(&heavy_sent, 1);
  }
  TRITONSERVER_ErrorDelete(TRITONBACKEND_ResponseFactorySendFlags(job->factory, TRITONSERVER_RESPONSE_COMPLETE_FINAL));
  TRITONSERVER_ErrorDelete(TRITONBACKEND_ResponseFactoryDelete(job->factory));
  free(job);
  return NULL;
}

static TRITONSERVER_Error* run(TRITONBACKEND_Request* request) {
  TRITONBACKEND_Input* input;
  TRITONBACKEND_Response* response;
  const void* data;
  uint64_t size;
  TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
  int64_t id = 0;
  TRY(TRITONBACKEND_RequestInput(request, "IN", &input));
  TRY(TRITONBACKEND_InputBuffer(input, 0, &data, &size, &type, &id));
  const int64_t* in = data;
  if (in[1]) {
    job_t* job = malloc(sizeof *job);
    *job = (job_t){NULL, in[0], in[1]};
    TRY(TRITONBACKEND_ResponseFactoryNew(&job->factory, request));
    pthread_t thread;
    pthread_create(&thread, NULL, send_all, job);
    pthread_detach(thread);
  } else {
    char* text = malloc((size_t)in[0] + 1);
    memset(text, 'x', (size_t)in[0]);
    text[in[0]] = '\0';
    TRY(TRITONBACKEND_ResponseNew(&response, request));
    TRY(respond(response, 1));
    TRITONSERVER_Error* error = TRITONBACKEND_ResponseSetStringParameter(response, "text", text);
    free(text);
    if (error != NULL) return error;
    TRY(TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, NULL));
  }
  return TRITONBACKEND_RequestRelease(request, TRITONSERVER_REQUEST_RELEASE_ALL);
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t count) {
  (void)instance;
  for (uint32_t i = 0; i < count; i++) TRY(run(requests[i]));
  return NULL;
}
