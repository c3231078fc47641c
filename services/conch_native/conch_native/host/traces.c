/* Traces: a backend adds named times to the trace of a request, and hands its context on. */
#include <stdlib.h>

#include "internal.h"

static atomic_uint_fast64_t last_id;

const char* TRITONSERVER_InferenceTraceLevelString(TRITONSERVER_InferenceTraceLevel level) {
  switch (level) {
    case TRITONSERVER_TRACE_LEVEL_DISABLED:
      return "DISABLED";
    case TRITONSERVER_TRACE_LEVEL_MIN:
      return "MIN";
    case TRITONSERVER_TRACE_LEVEL_MAX:
      return "MAX";
    case TRITONSERVER_TRACE_LEVEL_TIMESTAMPS:
      return "TIMESTAMPS";
    case TRITONSERVER_TRACE_LEVEL_TENSORS:
      return "TENSORS";
  }
  return "<unknown>";
}

const char* TRITONSERVER_InferenceTraceActivityString(TRITONSERVER_InferenceTraceActivity activity) {
  static const char* const names[] = {
      "REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END",
      "REQUEST_END", "TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_INPUT", "TENSOR_BACKEND_OUTPUT", "CUSTOM_ACTIVITY"};
  return (unsigned)activity < sizeof names / sizeof *names ? names[activity] : "<unknown>";
}

void trace_free(TRITONSERVER_InferenceTrace* trace) {
  if (trace->life != NULL) life_drop(trace->life);
  free(trace->context);
  free(trace);
}

TRITONSERVER_Error* TRITONSERVER_InferenceTraceReportActivity(
    TRITONSERVER_InferenceTrace* trace, uint64_t timestamp, const char* activity_name) {
  event_wait_for_room(trace->host);
  event_t* event = event_new(CONCH_ACTIVITY, trace->life->number);
  words_put(&event->body, timestamp);
  words_put_text(&event->body, activity_name);
  event_list_t one = {event, event};
  /* Before the response, with which the request's span ends. */
  event_post_of(trace->life, one, trace->host->model.decoupled);
  return NO_ERROR;
}

/* A request's trace is its own, and ends with it. */
TRITONSERVER_Error* TRITONSERVER_InferenceTraceDelete(TRITONSERVER_InferenceTrace* trace) {
  if (trace != NULL && !trace->owned) trace_free(trace);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceTraceId(TRITONSERVER_InferenceTrace* trace, uint64_t* id) {
  *id = trace->id;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceTraceParentId(TRITONSERVER_InferenceTrace* trace, uint64_t* parent_id) {
  *parent_id = trace->parent_id;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceTraceModelName(TRITONSERVER_InferenceTrace* trace, const char** model) {
  *model = trace->host->model.name;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceTraceModelVersion(TRITONSERVER_InferenceTrace* trace, int64_t* version) {
  *version = (int64_t)trace->host->model.version;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceTraceRequestId(TRITONSERVER_InferenceTrace* trace, const char** request_id) {
  *request_id = trace->life->id == NULL ? "" : trace->life->id;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceTraceSpawnChildTrace(
    TRITONSERVER_InferenceTrace* trace, TRITONSERVER_InferenceTrace** child) {
  *child = conch_alloc(sizeof **child);
  (*child)->life = life_hold(trace->life);
  (*child)->host = trace->host;
  (*child)->id = ((uint64_t)1 << 63) | (atomic_fetch_add(&last_id, 1) + 1);
  (*child)->parent_id = trace->id;
  (*child)->context = conch_copy(trace->context);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceTraceSetContext(
    TRITONSERVER_InferenceTrace* trace, const char* trace_context) {
  free(trace->context);
  trace->context = conch_copy(trace_context);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceTraceContext(
    TRITONSERVER_InferenceTrace* trace, const char** trace_context) {
  *trace_context = trace->context;
  return NO_ERROR;
}
