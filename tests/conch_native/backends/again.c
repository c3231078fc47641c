/* Executes a request as often as its input says, and responds with the number of executions. */
#include <string.h>

#include "triton/core/tritonbackend.h"

#define EXPORT __attribute__((visibility("default")))
#define TRY(call)                            \
  do {                                       \
    TRITONSERVER_Error* failed = (call);     \
    if (failed != NULL) return failed;       \
  } while (0)

static int64_t executions[1 << 16];

static TRITONSERVER_Error* run(TRITONBACKEND_Request* request) {
  TRITONBACKEND_Input* input;
  TRITONBACKEND_Response* response;
  TRITONBACKEND_Output* output;
  TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
  int64_t id = 0, dims[] = {1, 1};
  const void* data;
  void* buffer;
  uint64_t size, sequence;
  int64_t wanted;
  TRY(TRITONBACKEND_RequestCorrelationId(request, &sequence));
  TRY(TRITONBACKEND_RequestInput(request, "IN", &input));
  TRY(TRITONBACKEND_InputBuffer(input, 0, &data, &size, &type, &id));
  memcpy(&wanted, data, sizeof wanted);
  int64_t* count = &executions[sequence % (1 << 16)];
  if (++*count < wanted) return TRITONBACKEND_RequestRelease(request, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE);
  TRY(TRITONBACKEND_ResponseNew(&response, request));
  TRY(TRITONBACKEND_ResponseOutput(response, &output, "OUT", TRITONSERVER_TYPE_INT64, dims, 2));
  TRY(TRITONBACKEND_OutputBuffer(output, &buffer, sizeof *count, &type, &id));
  memcpy(buffer, count, sizeof *count);
  *count = 0;
  TRY(TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, NULL));
  return TRITONBACKEND_RequestRelease(request, TRITONSERVER_REQUEST_RELEASE_ALL);
}

EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t count) {
  (void)instance;
  for (uint32_t i = 0; i < count; i++) TRY(run(requests[i]));
  return NULL;
}
