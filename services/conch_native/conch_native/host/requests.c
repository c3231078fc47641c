/* Batches and requests, as the backend sees them until it releases them. */
#include <stdlib.h>
#include <time.h>

#include "internal.h"

/* --- Layouts ----------------------------------------------------------------------------------------------- */

conch_layout* conch_new_layout(const uint64_t* at) {
  conch_layout* layout = conch_alloc(sizeof *layout);
  atomic_init(&layout->references, 1);
  uint64_t size;
  layout->input_count = (uint32_t)*at++;
  layout->inputs = conch_alloc(layout->input_count * sizeof *layout->inputs);
  for (uint32_t i = 0; i < layout->input_count; i++) {
    tensor_t* tensor = &layout->inputs[i];
    tensor->datatype = (TRITONSERVER_DataType)*at++;
    tensor->rank = (uint32_t)*at++;
    tensor->dims = conch_alloc(tensor->rank * sizeof *tensor->dims);
    for (uint32_t j = 0; j < tensor->rank; j++) tensor->dims[j] = (int64_t)*at++;
    const char* name = words_text(&at, &size);
    tensor->name = conch_copy_bytes(name, size);
  }
  layout->output_count = (uint32_t)*at++;
  layout->outputs = conch_alloc(layout->output_count * sizeof *layout->outputs);
  for (uint32_t i = 0; i < layout->output_count; i++) {
    const char* name = words_text(&at, &size);
    layout->outputs[i] = conch_copy_bytes(name, size);
  }
  return layout;
}

void layout_drop(conch_layout* layout) {
  if (atomic_fetch_sub(&layout->references, 1) > 1) return;
  for (uint32_t i = 0; i < layout->input_count; i++) {
    free(layout->inputs[i].name);
    free(layout->inputs[i].dims);
  }
  for (uint32_t i = 0; i < layout->output_count; i++) free(layout->outputs[i]);
  free(layout->inputs);
  free(layout->outputs);
  free(layout);
}

void conch_free_layout(conch_layout* layout) { layout_drop(layout); }

/* --- Batches ----------------------------------------------------------------------------------------------- */

static TRITONBACKEND_Request* read_request(TRITONBACKEND_ModelInstance* instance, const uint64_t** at) {
  const uint64_t* words = *at;
  conch_layout* layout = (conch_layout*)(uintptr_t)words[1];
  TRITONBACKEND_Request* request =
      conch_alloc(sizeof *request + layout->input_count * sizeof(TRITONBACKEND_Input));
  atomic_init(&request->magic, REQUEST_LIVE);
  atomic_fetch_add(&layout->references, 1);
  request->layout = layout;
  request->flags = (uint32_t)words[2];
  request->correlation_id = words[4];
  request->timeout_us = words[5];
  uint64_t rare = words[7], size;
  const uint64_t* rarities = words + 8;
  char *id = NULL, *context = NULL;
  if (rare) {
    const char* text = words_text(&rarities, &size);
    if (size) id = conch_copy_bytes(text, size);
    text = words_text(&rarities, &size);
    if (size) request->correlation_text = conch_copy_bytes(text, size);
    text = words_text(&rarities, &size);
    if (size) context = conch_copy_bytes(text, size);
    request->parameters = words_parameters(&rarities);
  }
  request->life = life_open(instance, words[0], id);
  free(id);
  request->life->filler = words[3] != 0;
  if (words[6]) atomic_store(&request->life->cancelled, true);
  if (context != NULL) {
    request->trace = conch_alloc(sizeof *request->trace);
    request->trace->life = life_hold(request->life);
    request->trace->host = instance->host;
    request->trace->id = words[0];
    request->trace->context = context;
    request->trace->owned = true;
  }
  const uint64_t* places = words + 8 + rare;
  for (uint32_t i = 0; i < layout->input_count; i++) {
    TRITONBACKEND_Input* input = &request->inputs[i];
    input->tensor = &layout->inputs[i];
    input->data = (const void*)(uintptr_t)places[2 * i];
    input->attributes.size = places[2 * i + 1];
  }
  *at = places + 2 * layout->input_count;
  return request;
}

/* Released requests stay for a while, so that using one again is noticed. */
#define MOST_DEAD 8192
static pthread_mutex_t dead_lock = PTHREAD_MUTEX_INITIALIZER;
static TRITONBACKEND_Request *dead_first, *dead_last;
static size_t dead_count;

static void bury(TRITONBACKEND_Request* request) {
  TRITONBACKEND_Request* old = NULL;
  request->next_dead = NULL;
  pthread_mutex_lock(&dead_lock);
  if (dead_last == NULL)
    dead_first = request;
  else
    dead_last->next_dead = request;
  dead_last = request;
  if (++dead_count > MOST_DEAD) {
    old = dead_first;
    dead_first = old->next_dead;
    dead_count--;
  }
  pthread_mutex_unlock(&dead_lock);
  free(old);
}

/* Frees what a request holds; false if it was released before. */
static bool end_request(TRITONBACKEND_Request* request) {
  uint32_t live = REQUEST_LIVE;
  if (!atomic_compare_exchange_strong(&request->magic, &live, REQUEST_DEAD)) return false;
  conch_free_parameters(request->parameters);
  free(request->correlation_text);
  if (request->trace != NULL) trace_free(request->trace);
  states_free(request->states);
  layout_drop(request->layout);
  return true;
}

static uint64_t now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

int32_t conch_execute(
    conch_host* host, uint32_t index, uint32_t count, const uint64_t* words, uint64_t* out, uint64_t out_words,
    uint64_t* written, uint64_t times[2]) {
  TRITONBACKEND_ModelInstance* instance = host->instances[index];
  TRITONBACKEND_Request* few[64];
  TRITONBACKEND_Request** requests = count <= 64 ? few : conch_alloc(count * sizeof *requests);
  pthread_mutex_lock(&instance->lock);
  instance->batch++;
  pthread_mutex_unlock(&instance->lock);
  for (uint32_t i = 0; i < count; i++) requests[i] = read_request(instance, &words);
  pthread_mutex_lock(&instance->lock);
  instance->executing = true;
  instance->compute_start = instance->compute_end = 0;
  pthread_mutex_unlock(&instance->lock);

  const uint64_t begin = now_ns();
  TRITONSERVER_Error* error = host->execute(instance, requests, count);
  const uint64_t end = now_ns();

  if (error != NULL) {
    /* They are still the host's: unless the backend has released some all the same. */
    for (uint32_t i = 0; i < count; i++) {
      life_t* life = requests[i]->life;
      if (!end_request(requests[i])) continue;
      atomic_store(&life->final, true);
      life_drop(life);
      bury(requests[i]);
    }
  }
  pthread_mutex_lock(&instance->lock);
  instance->executing = false;
  event_list_t events = instance->events;
  instance->events = (event_list_t){NULL, NULL};
  /* Times that can't be are those of a backend that reports something else. */
  bool sane = begin <= instance->compute_start && instance->compute_start <= instance->compute_end &&
              instance->compute_end <= end;
  times[0] = sane ? instance->compute_start : 0;
  times[1] = sane ? instance->compute_end : 0;
  pthread_mutex_unlock(&instance->lock);
  if (requests != few) free(requests);
  if (error != NULL) { /* they are of other requests */
    *written = 0;
    event_post_all(host, events);
    return conch_take_error(error);
  }
  event_append_all(&instance->left, events);
  *written = conch_left(host, index, out, out_words);
  return CONCH_OK;
}

uint64_t conch_left(conch_host* host, uint32_t index, uint64_t* out, uint64_t out_words) {
  event_list_t* left = &host->instances[index]->left;
  uint64_t words = 0;
  size_t cost = 0;
  for (const event_t* each = left->first; each != NULL; each = each->next) words += each->body.count;
  return words > out_words ? words : event_take(left, out, out_words, &cost);
}

/* --- Requests ---------------------------------------------------------------------------------------------- */

/* An error of a getter, which names the request. */
#define REQUEST_ERROR(request, code, format, ...)                                             \
  conch_error(                                                                                \
      code, "[request id: %s] " format,                                                       \
      (request)->life->id == NULL ? "<id_unknown>" : (request)->life->id __VA_OPT__(, ) __VA_ARGS__)

#define CHECK_LIVE(request)                                                                   \
  do {                                                                                        \
    if ((request) == NULL)                                                                    \
      return conch_error(TRITONSERVER_ERROR_INVALID_ARG, "request was nullptr");              \
    if (atomic_load_explicit(&(request)->magic, memory_order_relaxed) != REQUEST_LIVE)        \
      return conch_error(TRITONSERVER_ERROR_INVALID_ARG, "the request was released before");  \
  } while (0)

#define CHECK_INDEX(request, index, count, what)                                              \
  do {                                                                                        \
    if ((index) >= (count))                                                                   \
      return REQUEST_ERROR(                                                                   \
          request, TRITONSERVER_ERROR_INVALID_ARG, "out of bounds index %u: request has %u " what, index, count); \
  } while (0)

TRITONSERVER_Error* TRITONBACKEND_RequestId(TRITONBACKEND_Request* request, const char** id) {
  CHECK_LIVE(request);
  *id = request->life->id == NULL ? "" : request->life->id;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_RequestIsCancelled(TRITONBACKEND_Request* request, bool* is_cancelled) {
  CHECK_LIVE(request);
  *is_cancelled = atomic_load(&request->life->cancelled);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_RequestCorrelationId(TRITONBACKEND_Request* request, uint64_t* id) {
  CHECK_LIVE(request);
  if (request->correlation_text != NULL)
    return REQUEST_ERROR(
        request, TRITONSERVER_ERROR_INVALID_ARG, "correlation ID in request is not an unsigned int");
  *id = request->correlation_id;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_RequestCorrelationIdString(TRITONBACKEND_Request* request, const char** id) {
  CHECK_LIVE(request);
  if (request->correlation_text == NULL)
    return REQUEST_ERROR(request, TRITONSERVER_ERROR_INVALID_ARG, "correlation ID in request is not a string");
  *id = request->correlation_text;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_InferenceRequestTimeoutMicroseconds(
    TRITONBACKEND_Request* request, uint64_t* timeout) {
  CHECK_LIVE(request);
  *timeout = request->timeout_us;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_RequestFlags(TRITONBACKEND_Request* request, uint32_t* flags) {
  CHECK_LIVE(request);
  *flags = request->flags;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_RequestParameterCount(TRITONBACKEND_Request* request, uint32_t* count) {
  CHECK_LIVE(request);
  *count = conch_parameter_count(request->parameters);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_RequestParameter(
    TRITONBACKEND_Request* request, uint32_t index, const char** key, TRITONSERVER_ParameterType* type,
    const void** vvalue) {
  CHECK_LIVE(request);
  CHECK_INDEX(request, index, conch_parameter_count(request->parameters), "parameters");
  const TRITONSERVER_Parameter* parameter = conch_parameter_at(request->parameters, index);
  *key = parameter->name;
  *type = parameter->type;
  *vvalue = conch_parameter_value(parameter);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_RequestInputCount(TRITONBACKEND_Request* request, uint32_t* count) {
  CHECK_LIVE(request);
  *count = request->layout->input_count;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_RequestInputName(
    TRITONBACKEND_Request* request, uint32_t index, const char** input_name) {
  CHECK_LIVE(request);
  CHECK_INDEX(request, index, request->layout->input_count, "inputs");
  *input_name = request->layout->inputs[index].name;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_RequestInput(
    TRITONBACKEND_Request* request, const char* name, TRITONBACKEND_Input** input) {
  CHECK_LIVE(request);
  for (uint32_t i = 0; i < request->layout->input_count; i++) {
    if (strcmp(request->layout->inputs[i].name, name) == 0) {
      *input = &request->inputs[i];
      return NO_ERROR;
    }
  }
  *input = NULL;
  return REQUEST_ERROR(request, TRITONSERVER_ERROR_INVALID_ARG, "unknown request input name %s", name);
}

TRITONSERVER_Error* TRITONBACKEND_RequestInputByIndex(
    TRITONBACKEND_Request* request, uint32_t index, TRITONBACKEND_Input** input) {
  CHECK_LIVE(request);
  CHECK_INDEX(request, index, request->layout->input_count, "inputs");
  *input = &request->inputs[index];
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_RequestOutputCount(TRITONBACKEND_Request* request, uint32_t* count) {
  CHECK_LIVE(request);
  *count = request->layout->output_count;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_RequestOutputName(
    TRITONBACKEND_Request* request, uint32_t index, const char** output_name) {
  CHECK_LIVE(request);
  CHECK_INDEX(request, index, request->layout->output_count, "requested outputs");
  *output_name = request->layout->outputs[index];
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_RequestOutputBufferProperties(
    TRITONBACKEND_Request* request, const char* name, size_t* size, TRITONSERVER_MemoryType* memory_type,
    int64_t* id) {
  (void)name;
  (void)size;
  (void)memory_type;
  (void)id;
  CHECK_LIVE(request);
  return conch_error(TRITONSERVER_ERROR_UNAVAILABLE, "Output properties are not available");
}

TRITONSERVER_Error* TRITONBACKEND_RequestTrace(TRITONBACKEND_Request* request, TRITONSERVER_InferenceTrace** trace) {
  CHECK_LIVE(request);
  *trace = request->trace;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_RequestRelease(TRITONBACKEND_Request* request, uint32_t flags) {
  if (request == NULL) return conch_error(TRITONSERVER_ERROR_INVALID_ARG, "request was nullptr");
  bool again = (flags & TRITONSERVER_REQUEST_RELEASE_RESCHEDULE) != 0;
  if (atomic_load(&request->magic) == REQUEST_LIVE && again && !request->life->host->model.iterative)
    return conch_error(
        TRITONSERVER_ERROR_INVALID_ARG,
        "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to "
        "handle such a flag.");
  if (!end_request(request)) {
    conch_host* host = atomic_load(&conch_current);
    event_wait_for_room(host);
    event_note(host, 0, "backend '%s' releases requests more than once", host->backend.name);
    return conch_error(TRITONSERVER_ERROR_INVALID_ARG, "the request was released before");
  }
  life_t* life = request->life;
  bury(request);
  life_release(life, again);
  life_drop(life);
  return NO_ERROR;
}

/* --- Inputs ------------------------------------------------------------------------------------------------ */

TRITONSERVER_Error* TRITONBACKEND_InputProperties(
    TRITONBACKEND_Input* input, const char** name, TRITONSERVER_DataType* datatype, const int64_t** dims,
    uint32_t* rank, uint64_t* size, uint32_t* buffers) {
  const tensor_t* tensor = input->tensor;
  if (name != NULL) *name = tensor->name;
  if (datatype != NULL) *datatype = tensor->datatype;
  if (dims != NULL) *dims = tensor->dims;
  if (rank != NULL) *rank = tensor->rank;
  if (size != NULL) *size = input->attributes.size;
  if (buffers != NULL) *buffers = 1;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_InputPropertiesForHostPolicy(
    TRITONBACKEND_Input* input, const char* policy, const char** name, TRITONSERVER_DataType* datatype,
    const int64_t** dims, uint32_t* rank, uint64_t* size, uint32_t* buffers) {
  (void)policy;
  return TRITONBACKEND_InputProperties(input, name, datatype, dims, rank, size, buffers);
}

static TRITONSERVER_Error* check_buffer(const TRITONBACKEND_Input* input, uint32_t index) {
  if (index == 0) return NO_ERROR;
  return conch_error(
      TRITONSERVER_ERROR_INVALID_ARG, "out of bounds index %u: input '%s' has 1 buffer", index, input->tensor->name);
}

TRITONSERVER_Error* TRITONBACKEND_InputBuffer(
    TRITONBACKEND_Input* input, uint32_t index, const void** buffer, uint64_t* size,
    TRITONSERVER_MemoryType* memory_type, int64_t* id) {
  *buffer = NULL;
  TRITONSERVER_Error* error = check_buffer(input, index);
  if (error != NULL) return error;
  *buffer = input->data;
  *size = input->attributes.size;
  *memory_type = input->attributes.type;
  *id = input->attributes.id;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_InputBufferForHostPolicy(
    TRITONBACKEND_Input* input, const char* policy, uint32_t index, const void** buffer, uint64_t* size,
    TRITONSERVER_MemoryType* memory_type, int64_t* id) {
  (void)policy;
  return TRITONBACKEND_InputBuffer(input, index, buffer, size, memory_type, id);
}

TRITONSERVER_Error* TRITONBACKEND_InputBufferAttributes(
    TRITONBACKEND_Input* input, uint32_t index, const void** buffer, TRITONSERVER_BufferAttributes** attributes) {
  *buffer = NULL;
  TRITONSERVER_Error* error = check_buffer(input, index);
  if (error != NULL) return error;
  *buffer = input->data;
  *attributes = &input->attributes;
  return NO_ERROR;
}
