/* A decoupled backend: N responses with 0 to N-1 from a thread of its own after Execute, then the end. */
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
  TRITONBACKEND_ResponseFactory* factory;
  int32_t count;
} job_t;

static TRITONSERVER_Error* respond(TRITONBACKEND_ResponseFactory* factory, int32_t value) {
  TRITONBACKEND_Response* response;
  TRITONBACKEND_Output* output;
  TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
  int64_t id = 0, dims[] = {1};
  void* buffer;
  TRY(TRITONBACKEND_ResponseNewFromFactory(&response, factory));
  TRY(TRITONBACKEND_ResponseOutput(response, &output, "OUT", TRITONSERVER_TYPE_INT32, dims, 1));
  TRY(TRITONBACKEND_OutputBuffer(output, &buffer, sizeof value, &type, &id));
  memcpy(buffer, &value, sizeof value);
  return TRITONBACKEND_ResponseSend(response, 0, NULL);
}

static void* run(void* argument) {
  job_t* job = argument;
  for (int32_t i = 0; i < job->count; i++) {
    bool cancelled = false;
    if (TRITONBACKEND_ResponseFactoryIsCancelled(job->factory, &cancelled) != NULL || cancelled) break;
    if (respond(job->factory, i) != NULL) break;
  }
  TRITONBACKEND_ResponseFactorySendFlags(job->factory, TRITONSERVER_RESPONSE_COMPLETE_FINAL);
  TRITONBACKEND_ResponseFactoryDelete(job->factory);
  free(job);
  return NULL;
}

EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t count) {
  (void)instance;
  for (uint32_t i = 0; i < count; i++) {
    TRITONBACKEND_Input* input;
    TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
    int64_t id = 0;
    const void* data;
    uint64_t size;
    pthread_t thread;
    job_t* job = malloc(sizeof *job);
    TRY(TRITONBACKEND_RequestInput(requests[i], "IN", &input));
    TRY(TRITONBACKEND_InputBuffer(input, 0, &data, &size, &type, &id));
    memcpy(&job->count, data, sizeof job->count);
    TRY(TRITONBACKEND_ResponseFactoryNew(&job->factory, requests[i]));
    pthread_create(&thread, NULL, run, job);
    pthread_detach(thread);
    TRY(TRITONBACKEND_RequestRelease(requests[i], TRITONSERVER_REQUEST_RELEASE_ALL));
  }
  return NULL;
}
