/* Counts down from IN to 0 in a decoupled model: one response and one execution for each number. What is left is the
 * state LEFT_IN, LEFT_OUT. */
#include <string.h>

#include "triton/core/tritonbackend.h"

#define TRY(call)                              \
  do {                                         \
    TRITONSERVER_Error* tried = (call);        \
    if (tried != NULL) return tried;           \
  } while (0)

static TRITONSERVER_Error* value_of(TRITONBACKEND_Request* request, const char* name, int64_t* value) {
  TRITONBACKEND_Input* input;
  const void* data;
  uint64_t size;
  TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
  int64_t id = 0;
  TRY(TRITONBACKEND_RequestInput(request, name, &input));
  TRY(TRITONBACKEND_InputBuffer(input, 0, &data, &size, &type, &id));
  memcpy(value, data, sizeof *value);
  return NULL;
}

static TRITONSERVER_Error* run(TRITONBACKEND_Request* request) {
  TRITONBACKEND_Response* response;
  TRITONBACKEND_Output* output;
  TRITONBACKEND_State* state;
  void* buffer;
  TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
  int64_t id = 0, shape[] = {1, 1}, left;
  uint32_t flags;
  TRY(TRITONBACKEND_RequestFlags(request, &flags));
  TRY(value_of(request, flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START ? "IN" : "LEFT_IN", &left));
  TRY(TRITONBACKEND_ResponseNew(&response, request));
  TRY(TRITONBACKEND_ResponseOutput(response, &output, "OUT", TRITONSERVER_TYPE_INT64, shape, 2));
  TRY(TRITONBACKEND_OutputBuffer(output, &buffer, sizeof left, &type, &id));
  memcpy(buffer, &left, sizeof left);
  TRY(TRITONBACKEND_ResponseSend(response, left ? 0 : TRITONSERVER_RESPONSE_COMPLETE_FINAL, NULL));
  if (left == 0) return TRITONBACKEND_RequestRelease(request, TRITONSERVER_REQUEST_RELEASE_ALL);
  left--;
  TRY(TRITONBACKEND_StateNew(&state, request, "LEFT_OUT", TRITONSERVER_TYPE_INT64, shape, 2));
  TRY(TRITONBACKEND_StateBuffer(state, &buffer, sizeof left, &type, &id));
  memcpy(buffer, &left, sizeof left);
  TRY(TRITONBACKEND_StateUpdate(state));
  return TRITONBACKEND_RequestRelease(request, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE);
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t count) {
  (void)instance;
  for (uint32_t i = 0; i < count; i++) TRY(run(requests[i]));
  return NULL;
}
