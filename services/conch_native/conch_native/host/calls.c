/* What a backend asks of the server: facts and loads of models, and requests to other models.
 *
 * A query waits until the worker answers it. A request to a model becomes an event; the worker says when the
 * server has its inputs, and brings the responses, on a thread of its own.
 */
#include <stdlib.h>

#include "internal.h"

typedef struct piece {
  const void* base;
  size_t size;
  TRITONSERVER_MemoryType type;
} piece_t;

typedef struct call_input {
  char* name;
  TRITONSERVER_DataType datatype;
  uint32_t rank;
  int64_t* dims;
  piece_t* pieces;
  size_t piece_count;
  void* joined; /* of several pieces */
  struct call_input* next;
} call_input_t;

typedef struct name {
  char* text;
  struct name* next;
} name_t;

struct TRITONSERVER_ResponseAllocator {
  TRITONSERVER_ResponseAllocatorAllocFn_t alloc;
  TRITONSERVER_ResponseAllocatorReleaseFn_t release;
  TRITONSERVER_ResponseAllocatorStartFn_t start;
  TRITONSERVER_ResponseAllocatorBufferAttributesFn_t attributes;
  TRITONSERVER_ResponseAllocatorQueryFn_t query;
};

struct TRITONSERVER_InferenceRequest {
  conch_host* host;
  char* model;
  int64_t version;
  char* id;
  uint32_t flags;
  uint64_t correlation_id;
  char* correlation_text; /* or NULL */
  uint64_t priority, timeout_us;
  call_input_t* inputs;
  name_t* outputs;
  TRITONSERVER_Parameter* parameters;
  TRITONSERVER_InferenceRequestReleaseFn_t release;
  void* release_userp;
  TRITONSERVER_ResponseAllocator* allocator;
  void* allocator_userp;
  TRITONSERVER_InferenceResponseCompleteFn_t complete;
  void* complete_userp;
  atomic_bool cancelled;
  _Atomic uint64_t call; /* its number while it runs, or 0 */
};

typedef struct call_output {
  char* name;
  TRITONSERVER_DataType datatype;
  uint32_t rank;
  int64_t* dims;
  void* buffer;
  void* buffer_userp;
  TRITONSERVER_BufferAttributes attributes;
  struct call_output* next;
} call_output_t;

struct TRITONSERVER_InferenceResponse {
  char* model;
  int64_t version;
  char* id;
  TRITONSERVER_Error_Code code;
  char* error; /* or NULL */
  TRITONSERVER_Parameter* parameters;
  call_output_t *outputs, *last;
  uint32_t output_count;
  TRITONSERVER_ResponseAllocator* allocator;
};

/* A query or a request that runs. */
struct conch_call {
  uint64_t number;
  conch_call_t* next;
  /* of a query */
  pthread_cond_t answered;
  bool is_query, has_answer;
  int32_t code;
  char* text;
  /* of a request: its callbacks, as the request may be deleted before the last response */
  TRITONSERVER_InferenceRequest* request; /* NULL once it was released */
  TRITONSERVER_ResponseAllocator* allocator;
  void* allocator_userp;
  TRITONSERVER_InferenceResponseCompleteFn_t complete;
  void* complete_userp;
};

static conch_call_t* call_find(conch_host* host, uint64_t number) {
  conch_call_t* call = host->calls;
  while (call != NULL && call->number != number) call = call->next;
  return call;
}

static void call_add(conch_host* host, conch_call_t* call) {
  call->number = ++host->last_call;
  call->next = host->calls;
  host->calls = call;
}

static void call_remove(conch_host* host, conch_call_t* call) {
  conch_call_t** place = &host->calls;
  while (*place != call) place = &(*place)->next;
  *place = call->next;
}

/* --- Queries ----------------------------------------------------------------------------------------------- */

/* Asks, with parameters of types STRING and BYTES, and waits for the answer: a text to be freed. */
static TRITONSERVER_Error* ask_with(
    TRITONSERVER_Server* server, enum conch_query kind, const char* model, int64_t version, const char* text,
    const TRITONSERVER_Parameter** parameters, uint64_t count, char** answer) {
  conch_host* host = server->host;
  conch_call_t call = {.is_query = true};
  pthread_cond_init(&call.answered, NULL);
  pthread_mutex_lock(&host->calls_lock);
  call_add(host, &call);
  event_t* event = event_new(CONCH_QUERY, 0);
  words_put(&event->body, call.number);
  words_put(&event->body, kind);
  words_put(&event->body, (uint64_t)version);
  words_put_text(&event->body, model);
  words_put_text(&event->body, text);
  words_put(&event->body, count);
  for (uint64_t i = 0; i < count; i++) {
    const TRITONSERVER_Parameter* each = parameters[i];
    bool bytes = each->type == TRITONSERVER_PARAMETER_BYTES;
    words_put(&event->body, each->type);
    words_put_text(&event->body, each->name);
    words_put_bytes(&event->body, conch_parameter_value(each), bytes ? each->size : strlen(each->value.text));
  }
  event_post(host, event);
  while (!call.has_answer) pthread_cond_wait(&call.answered, &host->calls_lock);
  call_remove(host, &call);
  pthread_mutex_unlock(&host->calls_lock);
  pthread_cond_destroy(&call.answered);
  TRITONSERVER_Error* error = NO_ERROR;
  if (call.code != CONCH_OK) error = TRITONSERVER_ErrorNew((TRITONSERVER_Error_Code)call.code, call.text);
  if (error == NULL && answer != NULL)
    *answer = call.text;
  else
    free(call.text);
  return error;
}

static TRITONSERVER_Error* ask(
    TRITONSERVER_Server* server, enum conch_query kind, const char* model, int64_t version, const char* text,
    char** answer) {
  return ask_with(server, kind, model, version, text, NULL, 0, answer);
}

void conch_answer(conch_host* host, uint64_t number, int32_t code, const char* text) {
  pthread_mutex_lock(&host->calls_lock);
  conch_call_t* call = call_find(host, number);
  if (call != NULL && call->is_query && !call->has_answer) {
    call->code = code;
    call->text = conch_copy(text);
    call->has_answer = true;
    pthread_cond_signal(&call->answered);
  }
  pthread_mutex_unlock(&host->calls_lock);
}

static TRITONSERVER_Error* ask_message(
    TRITONSERVER_Server* server, enum conch_query kind, const char* model, int64_t version, const char* text,
    TRITONSERVER_Message** message) {
  char* answer = NULL;
  *message = NULL;
  TRITONSERVER_Error* error = ask(server, kind, model, version, text, &answer);
  if (error != NULL) return error;
  *message = conch_message(answer);
  free(answer);
  return NO_ERROR;
}

static TRITONSERVER_Error* ask_number(
    TRITONSERVER_Server* server, enum conch_query kind, const char* model, int64_t version, uint64_t* number) {
  char* answer = NULL;
  TRITONSERVER_Error* error = ask(server, kind, model, version, NULL, &answer);
  if (error != NULL) return error;
  *number = strtoull(answer, NULL, 10);
  free(answer);
  return NO_ERROR;
}

static TRITONSERVER_Error* ask_truth(
    TRITONSERVER_Server* server, enum conch_query kind, const char* model, int64_t version, bool* truth) {
  uint64_t number = 0;
  TRITONSERVER_Error* error = ask_number(server, kind, model, version, &number);
  if (error == NULL) *truth = number != 0;
  return error;
}

TRITONSERVER_Error* TRITONSERVER_ServerIsLive(TRITONSERVER_Server* server, bool* live) {
  return ask_truth(server, CONCH_SERVER_LIVE, NULL, -1, live);
}

TRITONSERVER_Error* TRITONSERVER_ServerIsReady(TRITONSERVER_Server* server, bool* ready) {
  return ask_truth(server, CONCH_SERVER_READY, NULL, -1, ready);
}

TRITONSERVER_Error* TRITONSERVER_ServerModelIsReady(
    TRITONSERVER_Server* server, const char* model, int64_t version, bool* ready) {
  return ask_truth(server, CONCH_MODEL_READY, model, version, ready);
}

/* The answer's bit 0 says whether the model is decoupled, bit 1 whether it batches. */
TRITONSERVER_Error* TRITONSERVER_ServerModelBatchProperties(
    TRITONSERVER_Server* server, const char* model, int64_t version, uint32_t* flags, void** voidp) {
  uint64_t answer = 0;
  if (voidp != NULL) *voidp = NULL;
  TRITONSERVER_Error* error = ask_number(server, CONCH_MODEL_PROPERTIES, model, version, &answer);
  if (error == NULL) *flags = answer & 2 ? TRITONSERVER_BATCH_FIRST_DIM : TRITONSERVER_BATCH_UNKNOWN;
  return error;
}

TRITONSERVER_Error* TRITONSERVER_ServerModelTransactionProperties(
    TRITONSERVER_Server* server, const char* model, int64_t version, uint32_t* txn_flags, void** voidp) {
  uint64_t answer = 0;
  if (voidp != NULL) *voidp = NULL;
  TRITONSERVER_Error* error = ask_number(server, CONCH_MODEL_PROPERTIES, model, version, &answer);
  if (error == NULL) *txn_flags = answer & 1 ? TRITONSERVER_TXN_DECOUPLED : TRITONSERVER_TXN_ONE_TO_ONE;
  return error;
}

TRITONSERVER_Error* TRITONSERVER_ServerMetadata(TRITONSERVER_Server* server, TRITONSERVER_Message** message) {
  return ask_message(server, CONCH_SERVER_METADATA, NULL, -1, NULL, message);
}

TRITONSERVER_Error* TRITONSERVER_ServerModelMetadata(
    TRITONSERVER_Server* server, const char* model, int64_t version, TRITONSERVER_Message** message) {
  return ask_message(server, CONCH_MODEL_METADATA, model, version, NULL, message);
}

TRITONSERVER_Error* TRITONSERVER_ServerModelStatistics(
    TRITONSERVER_Server* server, const char* model, int64_t version, TRITONSERVER_Message** message) {
  return ask_message(server, CONCH_MODEL_STATISTICS, model, version, NULL, message);
}

TRITONSERVER_Error* TRITONSERVER_ServerModelConfig(
    TRITONSERVER_Server* server, const char* model, int64_t version, uint32_t config_version,
    TRITONSERVER_Message** message) {
  if (config_version != 1)
    return conch_error(
        TRITONSERVER_ERROR_INVALID_ARG, "model configuration version %u not supported, supported versions are: 1",
        config_version);
  return ask_message(server, CONCH_MODEL_CONFIG, model, version, NULL, message);
}

TRITONSERVER_Error* TRITONSERVER_ServerModelIndex(
    TRITONSERVER_Server* server, uint32_t flags, TRITONSERVER_Message** message) {
  const char* which = flags & TRITONSERVER_INDEX_FLAG_READY ? "ready_index" : "index";
  return ask_message(server, CONCH_MODEL_INDEX, NULL, -1, which, message);
}

/* Metrics are their text. */
struct TRITONSERVER_Metrics {
  TRITONSERVER_Message* text;
};

TRITONSERVER_Error* TRITONSERVER_ServerMetrics(TRITONSERVER_Server* server, TRITONSERVER_Metrics** metrics) {
  *metrics = NULL;
  TRITONSERVER_Message* text;
  TRITONSERVER_Error* error = ask_message(server, CONCH_SERVER_METRICS, NULL, -1, NULL, &text);
  if (error != NULL) return error;
  *metrics = conch_alloc(sizeof **metrics);
  (*metrics)->text = text;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_MetricsFormatted(
    TRITONSERVER_Metrics* metrics, TRITONSERVER_MetricFormat format, const char** base, size_t* size) {
  if (format != TRITONSERVER_METRIC_PROMETHEUS)
    return conch_error(TRITONSERVER_ERROR_INVALID_ARG, "unknown metrics format '%d'", (int)format);
  return TRITONSERVER_MessageSerializeToJson(metrics->text, base, size);
}

TRITONSERVER_Error* TRITONSERVER_MetricsDelete(TRITONSERVER_Metrics* metrics) {
  if (metrics != NULL) TRITONSERVER_ErrorDelete(TRITONSERVER_MessageDelete(metrics->text));
  free(metrics);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_ServerLoadModel(TRITONSERVER_Server* server, const char* model) {
  return ask(server, CONCH_LOAD, model, -1, NULL, NULL);
}

TRITONSERVER_Error* TRITONSERVER_ServerLoadModelWithParameters(
    TRITONSERVER_Server* server, const char* model, const TRITONSERVER_Parameter** parameters,
    uint64_t parameter_count) {
  for (uint64_t i = 0; i < parameter_count; i++) {
    const TRITONSERVER_ParameterType type = parameters[i]->type;
    if (type != TRITONSERVER_PARAMETER_STRING && type != TRITONSERVER_PARAMETER_BYTES)
      return conch_error(
          TRITONSERVER_ERROR_INVALID_ARG, "load parameter '%s' has type %s, expected STRING or BYTES",
          parameters[i]->name, TRITONSERVER_ParameterTypeString(type));
  }
  return ask_with(server, CONCH_LOAD, model, -1, NULL, parameters, parameter_count, NULL);
}

TRITONSERVER_Error* TRITONSERVER_ServerUnloadModel(TRITONSERVER_Server* server, const char* model) {
  return ask(server, CONCH_UNLOAD, model, -1, NULL, NULL);
}

TRITONSERVER_Error* TRITONSERVER_ServerUnloadModelAndDependents(TRITONSERVER_Server* server, const char* model) {
  return ask(server, CONCH_UNLOAD_DEPENDENTS, model, -1, NULL, NULL);
}

/* --- Requests to models ------------------------------------------------------------------------------------ */

TRITONSERVER_Error* TRITONSERVER_InferenceRequestNew(
    TRITONSERVER_InferenceRequest** request, TRITONSERVER_Server* server, const char* model, int64_t version) {
  *request = NULL;
  bool ready = false;
  TRITONSERVER_Error* error = TRITONSERVER_ServerModelIsReady(server, model, version, &ready);
  if (error != NULL) return error;
  if (!ready) return conch_error(TRITONSERVER_ERROR_UNAVAILABLE, "model '%s' is not ready", model);
  *request = conch_alloc(sizeof **request);
  (*request)->host = server->host;
  (*request)->model = conch_copy(model);
  (*request)->version = version;
  return NO_ERROR;
}

static void input_free(call_input_t* input) {
  free(input->name);
  free(input->dims);
  free(input->pieces);
  free(input->joined);
  free(input);
}

static void names_free(name_t* first) {
  while (first != NULL) {
    name_t* next = first->next;
    free(first->text);
    free(first);
    first = next;
  }
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestRemoveAllInputs(TRITONSERVER_InferenceRequest* request) {
  while (request->inputs != NULL) {
    call_input_t* next = request->inputs->next;
    input_free(request->inputs);
    request->inputs = next;
  }
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestDelete(TRITONSERVER_InferenceRequest* request) {
  if (request == NULL) return NO_ERROR;
  if (atomic_load(&request->call) != 0)
    return conch_error(TRITONSERVER_ERROR_INVALID_ARG, "the request can't be deleted before it was released");
  TRITONSERVER_InferenceRequestRemoveAllInputs(request);
  names_free(request->outputs);
  conch_free_parameters(request->parameters);
  free(request->model);
  free(request->id);
  free(request->correlation_text);
  free(request);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestId(TRITONSERVER_InferenceRequest* request, const char** id) {
  *id = request->id == NULL ? "" : request->id;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetId(TRITONSERVER_InferenceRequest* request, const char* id) {
  free(request->id);
  request->id = conch_copy(id);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestFlags(TRITONSERVER_InferenceRequest* request, uint32_t* flags) {
  *flags = request->flags;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetFlags(TRITONSERVER_InferenceRequest* request, uint32_t flags) {
  request->flags = flags;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestCorrelationId(
    TRITONSERVER_InferenceRequest* request, uint64_t* correlation_id) {
  if (request->correlation_text != NULL)
    return conch_error(TRITONSERVER_ERROR_INVALID_ARG, "correlation ID in request is not an unsigned int");
  *correlation_id = request->correlation_id;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestCorrelationIdString(
    TRITONSERVER_InferenceRequest* request, const char** correlation_id) {
  if (request->correlation_text == NULL)
    return conch_error(TRITONSERVER_ERROR_INVALID_ARG, "correlation ID in request is not a string");
  *correlation_id = request->correlation_text;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetCorrelationId(
    TRITONSERVER_InferenceRequest* request, uint64_t correlation_id) {
  free(request->correlation_text);
  request->correlation_text = NULL;
  request->correlation_id = correlation_id;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetCorrelationIdString(
    TRITONSERVER_InferenceRequest* request, const char* correlation_id) {
  free(request->correlation_text);
  request->correlation_text = conch_copy(correlation_id);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestCancel(TRITONSERVER_InferenceRequest* request) {
  atomic_store(&request->cancelled, true);
  uint64_t call = atomic_load(&request->call);
  if (call == 0) return NO_ERROR;
  event_t* event = event_new(CONCH_CALL_CANCEL, 0);
  words_put(&event->body, call);
  event_post(request->host, event);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestIsCancelled(
    TRITONSERVER_InferenceRequest* request, bool* is_cancelled) {
  *is_cancelled = atomic_load(&request->cancelled);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestPriority(TRITONSERVER_InferenceRequest* request, uint32_t* priority) {
  *priority = (uint32_t)request->priority;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestPriorityUInt64(
    TRITONSERVER_InferenceRequest* request, uint64_t* priority) {
  *priority = request->priority;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetPriority(
    TRITONSERVER_InferenceRequest* request, uint32_t priority) {
  request->priority = priority;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetPriorityUInt64(
    TRITONSERVER_InferenceRequest* request, uint64_t priority) {
  request->priority = priority;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestTimeoutMicroseconds(
    TRITONSERVER_InferenceRequest* request, uint64_t* timeout_us) {
  *timeout_us = request->timeout_us;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetTimeoutMicroseconds(
    TRITONSERVER_InferenceRequest* request, uint64_t timeout_us) {
  request->timeout_us = timeout_us;
  return NO_ERROR;
}

static call_input_t* input_named(TRITONSERVER_InferenceRequest* request, const char* name) {
  call_input_t* input = request->inputs;
  while (input != NULL && strcmp(input->name, name) != 0) input = input->next;
  return input;
}

static TRITONSERVER_Error* no_input(const char* name) {
  return conch_error(TRITONSERVER_ERROR_INVALID_ARG, "input '%s' does not exist in request", name);
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestAddInput(
    TRITONSERVER_InferenceRequest* request, const char* name, TRITONSERVER_DataType datatype, const int64_t* dims,
    uint64_t rank) {
  if (input_named(request, name) != NULL)
    return conch_error(TRITONSERVER_ERROR_INVALID_ARG, "input '%s' already exists in request", name);
  call_input_t* input = conch_alloc(sizeof *input);
  input->name = conch_copy(name);
  input->datatype = datatype;
  input->rank = (uint32_t)rank;
  input->dims = conch_alloc(rank * sizeof *dims);
  if (rank) memcpy(input->dims, dims, rank * sizeof *dims);
  call_input_t** last = &request->inputs;
  while (*last != NULL) last = &(*last)->next;
  *last = input;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestRemoveInput(TRITONSERVER_InferenceRequest* request, const char* name) {
  for (call_input_t** place = &request->inputs; *place != NULL; place = &(*place)->next) {
    if (strcmp((*place)->name, name) != 0) continue;
    call_input_t* input = *place;
    *place = input->next;
    input_free(input);
    return NO_ERROR;
  }
  return no_input(name);
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestAppendInputData(
    TRITONSERVER_InferenceRequest* request, const char* name, const void* base, size_t size,
    TRITONSERVER_MemoryType memory_type, int64_t id) {
  (void)id;
  call_input_t* input = input_named(request, name);
  if (input == NULL) return no_input(name);
  if (memory_type == TRITONSERVER_MEMORY_GPU)
    return conch_error(
        TRITONSERVER_ERROR_UNSUPPORTED, "input '%s' is in GPU memory, and calls to models take host memory", name);
  input->pieces = conch_realloc(input->pieces, (input->piece_count + 1) * sizeof *input->pieces);
  input->pieces[input->piece_count++] = (piece_t){base, size, memory_type};
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestAppendInputDataWithHostPolicy(
    TRITONSERVER_InferenceRequest* request, const char* name, const void* base, size_t size,
    TRITONSERVER_MemoryType memory_type, int64_t id, const char* policy) {
  (void)policy;
  return TRITONSERVER_InferenceRequestAppendInputData(request, name, base, size, memory_type, id);
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestAppendInputDataWithBufferAttributes(
    TRITONSERVER_InferenceRequest* request, const char* name, const void* base,
    TRITONSERVER_BufferAttributes* attributes) {
  return TRITONSERVER_InferenceRequestAppendInputData(
      request, name, base, attributes->size, attributes->type, attributes->id);
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestRemoveAllInputData(
    TRITONSERVER_InferenceRequest* request, const char* name) {
  call_input_t* input = input_named(request, name);
  if (input == NULL) return no_input(name);
  input->piece_count = 0;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestAddRequestedOutput(
    TRITONSERVER_InferenceRequest* request, const char* name) {
  name_t** last = &request->outputs;
  while (*last != NULL) last = &(*last)->next;
  *last = conch_alloc(sizeof **last);
  (*last)->text = conch_copy(name);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestRemoveRequestedOutput(
    TRITONSERVER_InferenceRequest* request, const char* name) {
  for (name_t** place = &request->outputs; *place != NULL;) {
    if (strcmp((*place)->text, name) == 0) {
      name_t* next = (*place)->next;
      free((*place)->text);
      free(*place);
      *place = next;
    } else {
      place = &(*place)->next;
    }
  }
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestRemoveAllRequestedOutputs(TRITONSERVER_InferenceRequest* request) {
  names_free(request->outputs);
  request->outputs = NULL;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetReleaseCallback(
    TRITONSERVER_InferenceRequest* request, TRITONSERVER_InferenceRequestReleaseFn_t request_release_fn,
    void* request_release_userp) {
  request->release = request_release_fn;
  request->release_userp = request_release_userp;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetResponseCallback(
    TRITONSERVER_InferenceRequest* request, TRITONSERVER_ResponseAllocator* allocator,
    void* response_allocator_userp, TRITONSERVER_InferenceResponseCompleteFn_t response_fn, void* response_userp) {
  request->allocator = allocator;
  request->allocator_userp = response_allocator_userp;
  request->complete = response_fn;
  request->complete_userp = response_userp;
  return NO_ERROR;
}

static TRITONSERVER_Error* set_parameter(
    TRITONSERVER_InferenceRequest* request, const char* key, TRITONSERVER_ParameterType type, const void* value) {
  TRITONSERVER_Parameter* parameter = TRITONSERVER_ParameterNew(key, type, value);
  if (parameter == NULL) return conch_error(TRITONSERVER_ERROR_INVALID_ARG, "parameter '%s' has no value", key);
  TRITONSERVER_Parameter** last = &request->parameters;
  while (*last != NULL) last = &(*last)->next;
  *last = parameter;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetStringParameter(
    TRITONSERVER_InferenceRequest* request, const char* key, const char* value) {
  return set_parameter(request, key, TRITONSERVER_PARAMETER_STRING, value);
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetIntParameter(
    TRITONSERVER_InferenceRequest* request, const char* key, int64_t value) {
  return set_parameter(request, key, TRITONSERVER_PARAMETER_INT, &value);
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetBoolParameter(
    TRITONSERVER_InferenceRequest* request, const char* key, bool value) {
  return set_parameter(request, key, TRITONSERVER_PARAMETER_BOOL, &value);
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetDoubleParameter(
    TRITONSERVER_InferenceRequest* request, const char* key, double value) {
  return set_parameter(request, key, TRITONSERVER_PARAMETER_DOUBLE, &value);
}

/* One buffer of an input's pieces. */
static void join(call_input_t* input, const void** base, size_t* size) {
  *base = NULL;
  *size = 0;
  if (input->piece_count == 1) {
    *base = input->pieces[0].base;
    *size = input->pieces[0].size;
    return;
  }
  for (size_t i = 0; i < input->piece_count; i++) *size += input->pieces[i].size;
  free(input->joined);
  char* to = input->joined = conch_alloc(*size);
  for (size_t i = 0; i < input->piece_count; i++) {
    if (input->pieces[i].size) memcpy(to, input->pieces[i].base, input->pieces[i].size);
    to += input->pieces[i].size;
  }
  *base = input->joined;
}

TRITONSERVER_Error* TRITONSERVER_ServerInferAsync(
    TRITONSERVER_Server* server, TRITONSERVER_InferenceRequest* request, TRITONSERVER_InferenceTrace* trace) {
  conch_host* host = server->host;
  if (request->complete == NULL || request->release == NULL || request->allocator == NULL) {
    if (trace != NULL) trace_free(trace);
    return conch_error(
        TRITONSERVER_ERROR_INVALID_ARG, "a request needs a release callback and a response callback before it is sent");
  }
  event_wait_for_room(host);
  conch_call_t* call = conch_alloc(sizeof *call);
  call->request = request;
  call->allocator = request->allocator;
  call->allocator_userp = request->allocator_userp;
  call->complete = request->complete;
  call->complete_userp = request->complete_userp;
  pthread_mutex_lock(&host->calls_lock);
  call_add(host, call);
  uint64_t number = call->number;
  pthread_mutex_unlock(&host->calls_lock);
  atomic_store(&request->call, number);

  event_t* event = event_new(CONCH_CALL, trace == NULL || trace->life == NULL ? 0 : trace->life->number);
  words_t* body = &event->body;
  words_put(body, number);
  words_put_text(body, request->model);
  words_put(body, (uint64_t)request->version);
  words_put(body, request->flags);
  words_put(body, request->correlation_id);
  words_put(body, request->priority);
  words_put(body, request->timeout_us);
  words_put_text(body, request->id);
  words_put_text(body, request->correlation_text);
  words_put_text(body, trace == NULL ? NULL : trace->context);
  words_put_parameters(body, request->parameters);
  uint64_t inputs = 0, outputs = 0;
  for (call_input_t* each = request->inputs; each != NULL; each = each->next) inputs++;
  words_put(body, inputs);
  for (call_input_t* each = request->inputs; each != NULL; each = each->next) {
    const void* base;
    size_t size;
    join(each, &base, &size);
    words_put(body, each->datatype);
    words_put_dims(body, each->dims, each->rank);
    words_put_text(body, each->name);
    words_put(body, (uint64_t)(uintptr_t)base);
    words_put(body, size);
  }
  for (name_t* each = request->outputs; each != NULL; each = each->next) outputs++;
  words_put(body, outputs);
  for (name_t* each = request->outputs; each != NULL; each = each->next) words_put_text(body, each->text);
  event_post(host, event);
  if (trace != NULL) trace_free(trace);
  return NO_ERROR;
}

/* Gives a request back to the backend, once. */
static void release(conch_host* host, conch_call_t* call) {
  pthread_mutex_lock(&host->calls_lock);
  TRITONSERVER_InferenceRequest* request = call->request;
  call->request = NULL;
  pthread_mutex_unlock(&host->calls_lock);
  if (request == NULL) return;
  atomic_store(&request->call, 0);
  request->release(request, TRITONSERVER_REQUEST_RELEASE_ALL, request->release_userp);
}

static conch_call_t* call_get(conch_host* host, uint64_t number) {
  pthread_mutex_lock(&host->calls_lock);
  conch_call_t* call = call_find(host, number);
  pthread_mutex_unlock(&host->calls_lock);
  return call == NULL || call->is_query ? NULL : call;
}

void conch_call_taken(conch_host* host, uint64_t number) {
  conch_call_t* call = call_get(host, number);
  if (call == NULL) return;
  conch_in_worker++;
  release(host, call);
  conch_in_worker--;
}

static TRITONSERVER_Error* fill(
    TRITONSERVER_InferenceResponse* response, conch_call_t* call, const uint64_t** at) {
  uint64_t size;
  call_output_t* output = conch_alloc(sizeof *output);
  output->datatype = (TRITONSERVER_DataType) * (*at)++;
  output->rank = (uint32_t) * (*at)++;
  output->dims = conch_alloc(output->rank * sizeof *output->dims);
  for (uint32_t i = 0; i < output->rank; i++) output->dims[i] = (int64_t) * (*at)++;
  const char* name = words_text(at, &size);
  output->name = conch_copy_bytes(name, size);
  const void* base = (const void*)(uintptr_t) * (*at)++;
  output->attributes.size = (size_t) * (*at)++;
  TRITONSERVER_Error* error = call->allocator->alloc(
      call->allocator, output->name, output->attributes.size, TRITONSERVER_MEMORY_CPU, 0, call->allocator_userp,
      &output->buffer, &output->buffer_userp, &output->attributes.type, &output->attributes.id);
  if (error == NULL && output->attributes.size && output->attributes.type == TRITONSERVER_MEMORY_GPU)
    error = conch_error(
        TRITONSERVER_ERROR_UNSUPPORTED, "output '%s' of a call was allocated in GPU memory", output->name);
  if (error == NULL && output->attributes.size) memcpy(output->buffer, base, output->attributes.size);
  if (error == NULL && call->allocator->attributes != NULL)
    error = call->allocator->attributes(
        call->allocator, output->name, &output->attributes, call->allocator_userp, output->buffer_userp);
  if (response->last == NULL)
    response->outputs = output;
  else
    response->last->next = output;
  response->last = output;
  response->output_count++;
  return error;
}

static void set_error(TRITONSERVER_InferenceResponse* response, TRITONSERVER_Error* error) {
  free(response->error);
  response->code = TRITONSERVER_ErrorCode(error);
  response->error = conch_copy(TRITONSERVER_ErrorMessage(error));
  TRITONSERVER_ErrorDelete(error);
}

void conch_reply(conch_host* host, uint64_t number, const uint64_t* at) {
  conch_call_t* call = call_get(host, number);
  if (call == NULL) return;
  uint32_t flags = (uint32_t)*at++;
  uint64_t code = *at++, present = *at++, size;
  TRITONSERVER_InferenceResponse* response = NULL;
  if (present) {
    response = conch_alloc(sizeof *response);
    response->allocator = call->allocator;
    const char* text = words_text(&at, &size);
    response->model = conch_copy_bytes(text, size);
    response->version = (int64_t)*at++;
    text = words_text(&at, &size);
    response->id = conch_copy_bytes(text, size);
    if (code != NO_CODE) {
      text = words_text(&at, &size);
      response->code = (TRITONSERVER_Error_Code)code;
      response->error = conch_copy_bytes(text, size);
    } else {
      response->parameters = words_parameters(&at);
      TRITONSERVER_Error* error = NO_ERROR;
      if (call->allocator->start != NULL) error = call->allocator->start(call->allocator, call->allocator_userp);
      uint64_t count = *at++;
      for (uint64_t i = 0; i < count && error == NULL; i++) error = fill(response, call, &at);
      if (error != NULL) set_error(response, error);
    }
  }
  bool final = (flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL) != 0;
  conch_in_worker++;
  if (final) release(host, call);
  call->complete(response, flags, call->complete_userp);
  conch_in_worker--;
  if (!final) return;
  pthread_mutex_lock(&host->calls_lock);
  call_remove(host, call);
  pthread_mutex_unlock(&host->calls_lock);
  free(call);
}

/* --- Responses of models ----------------------------------------------------------------------------------- */

TRITONSERVER_Error* TRITONSERVER_InferenceResponseDelete(TRITONSERVER_InferenceResponse* response) {
  TRITONSERVER_Error* first = NO_ERROR;
  while (response->outputs != NULL) {
    call_output_t* output = response->outputs;
    response->outputs = output->next;
    TRITONSERVER_Error* error = NO_ERROR;
    if (response->allocator->release != NULL)
      error = response->allocator->release(
          response->allocator, output->buffer, output->buffer_userp, output->attributes.size,
          output->attributes.type, output->attributes.id);
    if (first == NULL)
      first = error;
    else
      TRITONSERVER_ErrorDelete(error);
    free(output->name);
    free(output->dims);
    free(output);
  }
  conch_free_parameters(response->parameters);
  free(response->model);
  free(response->id);
  free(response->error);
  free(response);
  return first;
}

TRITONSERVER_Error* TRITONSERVER_InferenceResponseError(TRITONSERVER_InferenceResponse* response) {
  return response->error == NULL ? NO_ERROR : TRITONSERVER_ErrorNew(response->code, response->error);
}

TRITONSERVER_Error* TRITONSERVER_InferenceResponseModel(
    TRITONSERVER_InferenceResponse* response, const char** model, int64_t* version) {
  *model = response->model;
  *version = response->version;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceResponseId(
    TRITONSERVER_InferenceResponse* response, const char** request_id) {
  *request_id = response->id;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceResponseParameterCount(
    TRITONSERVER_InferenceResponse* response, uint32_t* count) {
  *count = conch_parameter_count(response->parameters);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceResponseParameter(
    TRITONSERVER_InferenceResponse* response, uint32_t index, const char** name, TRITONSERVER_ParameterType* type,
    const void** vvalue) {
  const TRITONSERVER_Parameter* parameter = conch_parameter_at(response->parameters, index);
  if (parameter == NULL)
    return conch_error(
        TRITONSERVER_ERROR_INVALID_ARG, "out of bounds index %u: response has %u parameters", index,
        conch_parameter_count(response->parameters));
  *name = parameter->name;
  *type = parameter->type;
  *vvalue = conch_parameter_value(parameter);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceResponseOutputCount(
    TRITONSERVER_InferenceResponse* response, uint32_t* count) {
  *count = response->output_count;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_InferenceResponseOutput(
    TRITONSERVER_InferenceResponse* response, uint32_t index, const char** name, TRITONSERVER_DataType* datatype,
    const int64_t** dims, uint64_t* rank, const void** base, size_t* size, TRITONSERVER_MemoryType* memory_type,
    int64_t* id, void** userp) {
  if (index >= response->output_count)
    return conch_error(
        TRITONSERVER_ERROR_INVALID_ARG, "out of bounds index %u: response has %u outputs", index,
        response->output_count);
  const call_output_t* output = response->outputs;
  while (index-- > 0) output = output->next;
  *name = output->name;
  *datatype = output->datatype;
  *dims = output->dims;
  *rank = output->rank;
  *base = output->buffer;
  *size = output->attributes.size;
  *memory_type = output->attributes.type;
  *id = output->attributes.id;
  *userp = output->buffer_userp;
  return NO_ERROR;
}

/* --- Allocators -------------------------------------------------------------------------------------------- */

TRITONSERVER_Error* TRITONSERVER_ResponseAllocatorNew(
    TRITONSERVER_ResponseAllocator** allocator, TRITONSERVER_ResponseAllocatorAllocFn_t alloc_fn,
    TRITONSERVER_ResponseAllocatorReleaseFn_t release_fn, TRITONSERVER_ResponseAllocatorStartFn_t start_fn) {
  *allocator = conch_alloc(sizeof **allocator);
  (*allocator)->alloc = alloc_fn;
  (*allocator)->release = release_fn;
  (*allocator)->start = start_fn;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_ResponseAllocatorSetBufferAttributesFunction(
    TRITONSERVER_ResponseAllocator* allocator,
    TRITONSERVER_ResponseAllocatorBufferAttributesFn_t buffer_attributes_fn) {
  allocator->attributes = buffer_attributes_fn;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_ResponseAllocatorSetQueryFunction(
    TRITONSERVER_ResponseAllocator* allocator, TRITONSERVER_ResponseAllocatorQueryFn_t query_fn) {
  allocator->query = query_fn;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_ResponseAllocatorDelete(TRITONSERVER_ResponseAllocator* allocator) {
  free(allocator);
  return NO_ERROR;
}
