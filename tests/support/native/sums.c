/* Sums the inputs of a sequence in an implicit state. */
#include <string.h>

#include "triton/core/tritonbackend.h"

#define EXPORT __attribute__((visibility("default")))
#define TRY(call)                            \
  do {                                       \
    TRITONSERVER_Error* failed = (call);     \
    if (failed != NULL) return failed;       \
  } while (0)

static TRITONSERVER_Error* read_number(TRITONBACKEND_Request* request, const char* name, int32_t* number) {
  TRITONBACKEND_Input* input;
  TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
  int64_t id = 0;
  const void* data;
  uint64_t size;
  TRY(TRITONBACKEND_RequestInput(request, name, &input));
  TRY(TRITONBACKEND_InputBuffer(input, 0, &data, &size, &type, &id));
  memcpy(number, data, sizeof *number);
  return NULL;
}

static TRITONSERVER_Error* add(TRITONBACKEND_Request* request) {
  int32_t value, sum;
  int64_t dims[] = {1, 1}, id = 0;
  TRITONBACKEND_State* state;
  TRITONBACKEND_Response* response;
  TRITONBACKEND_Output* output;
  TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
  void* buffer;
  TRY(read_number(request, "IN", &value));
  TRY(read_number(request, "SUM_IN", &sum));
  sum += value;
  TRY(TRITONBACKEND_StateNew(&state, request, "SUM_OUT", TRITONSERVER_TYPE_INT32, dims, 2));
  TRY(TRITONBACKEND_StateBuffer(state, &buffer, sizeof sum, &type, &id));
  memcpy(buffer, &sum, sizeof sum);
  TRY(TRITONBACKEND_ResponseNew(&response, request));
  TRY(TRITONBACKEND_ResponseOutput(response, &output, "OUT", TRITONSERVER_TYPE_INT32, dims, 2));
  TRY(TRITONBACKEND_OutputBuffer(output, &buffer, sizeof sum, &type, &id));
  memcpy(buffer, &sum, sizeof sum);
  if (value % 2) TRY(TRITONBACKEND_StateUpdate(state)); /* before or after the response */
  TRY(TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, NULL));
  if (value % 2 == 0) TRY(TRITONBACKEND_StateUpdate(state));
  return TRITONBACKEND_RequestRelease(request, TRITONSERVER_REQUEST_RELEASE_ALL);
}

EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t count) {
  (void)instance;
  for (uint32_t i = 0; i < count; i++) TRY(add(requests[i]));
  return NULL;
}
