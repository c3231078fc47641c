/* Sums IN over a sequence. The sum is the state SUM_IN, SUM_OUT; without a state in the config, it is kept here by
 * the correlation id. With the state LEFT_IN, LEFT_OUT it runs IN times again before it answers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "triton/core/tritonbackend.h"

#define TRY(call)                              \
  do {                                         \
    TRITONSERVER_Error* tried = (call);        \
    if (tried != NULL) return tried;           \
  } while (0)

typedef struct {
  uint64_t id;
  char text[32];
  int64_t sum;
} sequence_t;

static sequence_t sequences[64];

static TRITONSERVER_Error* value_of(TRITONBACKEND_Request* request, const char* name, int64_t* value) {
  TRITONBACKEND_Input* input;
  const void* data;
  uint64_t size;
  TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
  int64_t id = 0;
  TRY(TRITONBACKEND_RequestInput(request, name, &input));
  TRY(TRITONBACKEND_InputBuffer(input, 0, &data, &size, &type, &id));
  if (size != sizeof *value) return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INTERNAL, "not one INT64");
  memcpy(value, data, size);
  return NULL;
}

/* The sum of a sequence that is kept here. */
static TRITONSERVER_Error* kept(TRITONBACKEND_Request* request, int64_t** sum) {
  uint64_t id = 0;
  const char* text = "";
  uint32_t flags;
  TRITONSERVER_Error* error = TRITONBACKEND_RequestCorrelationId(request, &id);
  if (error != NULL) {
    TRITONSERVER_ErrorDelete(error);
    TRY(TRITONBACKEND_RequestCorrelationIdString(request, &text));
  }
  TRY(TRITONBACKEND_RequestFlags(request, &flags));
  sequence_t* free = NULL;
  for (size_t i = 0; i < 64; i++) {
    sequence_t* each = &sequences[i];
    if (each->id == id && strcmp(each->text, text) == 0 && (id || *text)) {
      if (flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START) each->sum = 0;
      *sum = &each->sum;
      return NULL;
    }
    if (!each->id && !*each->text && free == NULL) free = each;
  }
  if (free == NULL || !(flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START))
    return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INVALID_ARG, "the sequence has not begun");
  free->id = id;
  snprintf(free->text, sizeof free->text, "%s", text);
  free->sum = 0;
  *sum = &free->sum;
  return NULL;
}

static TRITONSERVER_Error* respond(TRITONBACKEND_Request* request, int64_t value) {
  TRITONBACKEND_Response* response;
  TRITONBACKEND_Output* output;
  void* buffer;
  TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
  int64_t id = 0, shape[] = {1, 1};
  TRY(TRITONBACKEND_ResponseNew(&response, request));
  TRY(TRITONBACKEND_ResponseOutput(response, &output, "OUT", TRITONSERVER_TYPE_INT64, shape, 2));
  TRY(TRITONBACKEND_OutputBuffer(output, &buffer, sizeof value, &type, &id));
  memcpy(buffer, &value, sizeof value);
  return TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, NULL);
}

static TRITONSERVER_Error* keep_state(TRITONBACKEND_Request* request, const char* name, int64_t value) {
  TRITONBACKEND_State* state;
  void* buffer;
  TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
  int64_t id = 0, shape[] = {1, 1};
  TRY(TRITONBACKEND_StateNew(&state, request, name, TRITONSERVER_TYPE_INT64, shape, 2));
  TRY(TRITONBACKEND_StateBuffer(state, &buffer, sizeof value, &type, &id));
  memcpy(buffer, &value, sizeof value);
  return TRITONBACKEND_StateUpdate(state);
}

static TRITONSERVER_Error* run(TRITONBACKEND_Request* request, bool* again) {
  int64_t value, sum, *own = NULL;
  *again = false;
  TRY(value_of(request, "IN", &value));
  TRITONSERVER_Error* error = value_of(request, "LEFT_IN", &sum);
  if (error == NULL) {
    uint32_t flags;
    TRY(TRITONBACKEND_RequestFlags(request, &flags));
    int64_t left = flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START ? value : sum - 1;
    *again = left > 0;
    return *again ? keep_state(request, "LEFT_OUT", left) : respond(request, value);
  }
  TRITONSERVER_ErrorDelete(error);
  error = value_of(request, "SUM_IN", &sum);
  if (error == NULL) {
    TRY(keep_state(request, "SUM_OUT", sum + value));
    return respond(request, sum + value);
  }
  TRITONSERVER_ErrorDelete(error);
  TRY(kept(request, &own));
  *own += value;
  return respond(request, *own);
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t count) {
  (void)instance;
  for (uint32_t i = 0; i < count; i++) {
    bool again = false;
    TRITONSERVER_Error* error = run(requests[i], &again);
    if (error != NULL) {
      TRITONBACKEND_Response* response;
      TRITONSERVER_ErrorDelete(TRITONBACKEND_ResponseNew(&response, requests[i]));
      TRITONSERVER_ErrorDelete(
          TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, error));
      TRITONSERVER_ErrorDelete(error);
    }
    const uint32_t how = again ? TRITONSERVER_REQUEST_RELEASE_RESCHEDULE : TRITONSERVER_REQUEST_RELEASE_ALL;
    TRITONSERVER_ErrorDelete(TRITONBACKEND_RequestRelease(requests[i], how));
  }
  return NULL;
}
