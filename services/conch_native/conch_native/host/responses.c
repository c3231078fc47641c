/* Responses, their outputs, factories, states, and statistics of responses. */
#include <stdio.h>
#include <stdlib.h>

#include "internal.h"

#define ALIGNMENT 64

struct TRITONBACKEND_Output {
  char* name;
  uint64_t index;
  TRITONSERVER_DataType datatype;
  void* buffer;
  bool allocated;
  TRITONSERVER_BufferAttributes attributes;
  TRITONBACKEND_Output* next;
  uint32_t rank;
  int64_t dims[];
};

/* What stays of a response or a state once it was sent. */
struct conch_result {
  TRITONBACKEND_Output* first;
};

struct TRITONBACKEND_Response {
  life_t* life;
  TRITONBACKEND_Output *first, *last;
  TRITONSERVER_Parameter *parameters, *last_parameter;
  uint32_t output_count;
};

struct TRITONBACKEND_ResponseFactory {
  life_t* life;
};

struct TRITONBACKEND_State {
  TRITONBACKEND_Request* request;
  TRITONBACKEND_Output* output; /* NULL once the update was sent */
  TRITONBACKEND_State* next;
};

#define CHECK_RESPONSE(response)                                                              \
  do {                                                                                        \
    if ((response) == NULL)                                                                   \
      return conch_error(TRITONSERVER_ERROR_INVALID_ARG, "response was nullptr");             \
  } while (0)

/* --- Outputs ----------------------------------------------------------------------------------------------- */

static TRITONBACKEND_Output* output_new(
    const char* name, TRITONSERVER_DataType datatype, const int64_t* dims, uint32_t rank) {
  TRITONBACKEND_Output* output = conch_alloc(sizeof *output + rank * sizeof(int64_t));
  output->name = conch_copy(name);
  output->datatype = datatype;
  output->rank = rank;
  if (rank) memcpy(output->dims, dims, rank * sizeof *dims);
  return output;
}

static void outputs_free(TRITONBACKEND_Output* first) {
  while (first != NULL) {
    TRITONBACKEND_Output* next = first->next;
    free(first->buffer);
    free(first->name);
    free(first);
    first = next;
  }
}

void conch_free_result(conch_result* result) {
  if (result == NULL) return;
  outputs_free(result->first);
  free(result);
}

static TRITONSERVER_Error* allocate(TRITONBACKEND_Output* output, uint64_t size) {
  size_t padded = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  output->buffer = padded < size ? NULL : aligned_alloc(ALIGNMENT, padded ? padded : ALIGNMENT);
  if (output->buffer == NULL)
    return conch_error(
        TRITONSERVER_ERROR_UNAVAILABLE, "no memory for the %llu bytes of output '%s'", (unsigned long long)size,
        output->name);
  output->allocated = true;
  output->attributes.size = size;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_OutputBuffer(
    TRITONBACKEND_Output* output, void** buffer, uint64_t size, TRITONSERVER_MemoryType* memory_type, int64_t* id) {
  *buffer = NULL;
  if (output->allocated)
    return conch_error(
        TRITONSERVER_ERROR_ALREADY_EXISTS, "allocated buffer for output '%s' already exists", output->name);
  TRITONSERVER_Error* error = allocate(output, size);
  if (error != NULL) return error;
  *buffer = output->buffer;
  *memory_type = TRITONSERVER_MEMORY_CPU;
  *id = 0;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_OutputBufferAttributes(
    TRITONBACKEND_Output* output, TRITONSERVER_BufferAttributes** attributes) {
  *attributes = &output->attributes;
  return NO_ERROR;
}

static void words_put_output(words_t* to, const TRITONBACKEND_Output* output) {
  words_put(to, output->index);
  words_put(to, output->datatype);
  words_put_dims(to, output->dims, output->rank);
  words_put(to, (uint64_t)(uintptr_t)output->buffer);
  words_put(to, output->attributes.size);
  words_put(to, TRITONSERVER_MEMORY_CPU);
  words_put(to, 0);
  if (output->index == NO_CODE) words_put_text(to, output->name);
}

/* --- Responses --------------------------------------------------------------------------------------------- */

static TRITONBACKEND_Response* response_new(life_t* life) {
  TRITONBACKEND_Response* response = conch_alloc(sizeof *response);
  response->life = life_hold(life);
  atomic_fetch_add(&life->producers, 1);
  return response;
}

/* Frees a response but its outputs. */
static void response_end(TRITONBACKEND_Response* response) {
  life_t* life = response->life;
  conch_free_parameters(response->parameters);
  free(response);
  atomic_fetch_sub(&life->producers, 1);
  life_check(life);
  life_drop(life);
}

TRITONSERVER_Error* TRITONBACKEND_ResponseNew(TRITONBACKEND_Response** response, TRITONBACKEND_Request* request) {
  *response = NULL;
  if (request == NULL || atomic_load(&request->magic) != REQUEST_LIVE)
    return conch_error(
        TRITONSERVER_ERROR_INVALID_ARG, "a response needs a request that was not released; use a response factory");
  *response = response_new(request->life);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ResponseNewFromFactory(
    TRITONBACKEND_Response** response, TRITONBACKEND_ResponseFactory* factory) {
  *response = response_new(factory->life);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ResponseDelete(TRITONBACKEND_Response* response) {
  CHECK_RESPONSE(response);
  outputs_free(response->first);
  response_end(response);
  return NO_ERROR;
}

static TRITONSERVER_Error* add_parameter(
    TRITONBACKEND_Response* response, const char* name, TRITONSERVER_ParameterType type, const void* value) {
  CHECK_RESPONSE(response);
  TRITONSERVER_Parameter* parameter = TRITONSERVER_ParameterNew(name, type, value);
  if (parameter == NULL)
    return conch_error(TRITONSERVER_ERROR_INVALID_ARG, "response parameter '%s' has no value", name);
  if (response->last_parameter == NULL)
    response->parameters = parameter;
  else
    response->last_parameter->next = parameter;
  response->last_parameter = parameter;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ResponseSetStringParameter(
    TRITONBACKEND_Response* response, const char* name, const char* value) {
  return add_parameter(response, name, TRITONSERVER_PARAMETER_STRING, value);
}

TRITONSERVER_Error* TRITONBACKEND_ResponseSetIntParameter(
    TRITONBACKEND_Response* response, const char* name, int64_t value) {
  return add_parameter(response, name, TRITONSERVER_PARAMETER_INT, &value);
}

TRITONSERVER_Error* TRITONBACKEND_ResponseSetBoolParameter(
    TRITONBACKEND_Response* response, const char* name, bool value) {
  return add_parameter(response, name, TRITONSERVER_PARAMETER_BOOL, &value);
}

TRITONSERVER_Error* TRITONBACKEND_ResponseSetDoubleParameter(
    TRITONBACKEND_Response* response, const char* name, double value) {
  return add_parameter(response, name, TRITONSERVER_PARAMETER_DOUBLE, &value);
}

TRITONSERVER_Error* TRITONBACKEND_ResponseOutput(
    TRITONBACKEND_Response* response, TRITONBACKEND_Output** output, const char* name,
    TRITONSERVER_DataType datatype, const int64_t* dims, uint32_t rank) {
  *output = NULL;
  CHECK_RESPONSE(response);
  const TRITONBACKEND_Model* model = &response->life->host->model;
  uint32_t index = 0;
  while (index < model->output_count && strcmp(model->outputs[index], name) != 0) index++;
  if (index == model->output_count)
    return conch_error(
        TRITONSERVER_ERROR_INVALID_ARG, "unexpected inference output '%s' for model '%s'", name, model->name);
  for (TRITONBACKEND_Output* each = response->first; each != NULL; each = each->next)
    if (each->index == index)
      return conch_error(
          TRITONSERVER_ERROR_ALREADY_EXISTS, "output '%s' is in the response already", name);
  TRITONBACKEND_Output* made = output_new(name, datatype, dims, rank);
  made->index = index;
  if (response->last == NULL)
    response->first = made;
  else
    response->last->next = made;
  response->last = made;
  response->output_count++;
  *output = made;
  return NO_ERROR;
}

static TRITONSERVER_Error* describe(
    const TRITONBACKEND_Output* output, TRITONSERVER_DataType* datatype, const int64_t** dims, uint64_t* rank) {
  if (datatype != NULL) *datatype = output->datatype;
  if (dims != NULL) *dims = output->dims;
  if (rank != NULL) *rank = output->rank;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_InferenceResponseOutputByName(
    TRITONBACKEND_Response* response, const char* name, TRITONSERVER_DataType* datatype, const int64_t** dims,
    uint64_t* rank) {
  CHECK_RESPONSE(response);
  for (const TRITONBACKEND_Output* each = response->first; each != NULL; each = each->next)
    if (strcmp(each->name, name) == 0) return describe(each, datatype, dims, rank);
  return conch_error(TRITONSERVER_ERROR_NOT_FOUND, "output '%s' is not found in the response", name);
}

TRITONSERVER_Error* TRITONBACKEND_InferenceResponseOutput(
    TRITONBACKEND_Response* response, uint32_t index, const char** name, TRITONSERVER_DataType* datatype,
    const int64_t** dims, uint64_t* rank) {
  CHECK_RESPONSE(response);
  if (index >= response->output_count)
    return conch_error(
        TRITONSERVER_ERROR_INVALID_ARG, "out of bounds index %u: response has %u outputs", index,
        response->output_count);
  const TRITONBACKEND_Output* output = response->first;
  while (index-- > 0) output = output->next;
  if (name != NULL) *name = output->name;
  return describe(output, datatype, dims, rank);
}

/* True if a response may be sent; notes what is wrong otherwise. */
static bool admit(life_t* life) {
  conch_host* host = life->host;
  if (!atomic_load(&life->final)) return true;
  event_note(
      host, life->number, "backend '%s' sends %s", host->backend.name,
      host->model.decoupled ? "responses after the final one"
                            : "several responses to a request, but the model is not decoupled");
  return false;
}

/* Words of the outputs' bytes; more than CONCH_SMALL allows if they are too many. */
static size_t words_of(const TRITONBACKEND_Output* each) {
  size_t words = 0;
  for (; each != NULL && words <= CONCH_SMALL / 8; each = each->next) words += (each->attributes.size + 7) / 8;
  return words;
}

static void put_small(words_t* to, const TRITONBACKEND_Response* response) {
  size_t described = to->count;
  words_put(to, 0);
  words_put(to, response->output_count);
  for (const TRITONBACKEND_Output* each = response->first; each != NULL; each = each->next) {
    words_put(to, each->index);
    words_put(to, each->datatype);
    words_put_dims(to, each->dims, each->rank);
    words_put(to, each->attributes.size);
  }
  to->words[described] = to->count - described - 1;
  for (const TRITONBACKEND_Output* each = response->first; each != NULL; each = each->next)
    words_put_padded(to, each->buffer, each->attributes.size);
}

TRITONSERVER_Error* TRITONBACKEND_ResponseSend(
    TRITONBACKEND_Response* response, uint32_t flags, TRITONSERVER_Error* error) {
  CHECK_RESPONSE(response);
  life_t* life = response->life;
  event_wait_for_room(life->host);
  /* The only response is the last one, also where the flag follows by itself. */
  bool final = (flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL) != 0 || !life->host->model.decoupled;
  if (!admit(life)) {
    outputs_free(response->first);
    response_end(response);
    return NO_ERROR;
  }
  bool small = error == NULL && response->parameters == NULL && words_of(response->first) <= CONCH_SMALL / 8;
  event_t* event = event_new(small ? CONCH_SMALL_RESPONSE : CONCH_RESPONSE, life->number);
  words_t* body = &event->body;
  words_put(body, final);
  if (small) {
    put_small(body, response);
    outputs_free(response->first);
  } else if (error != NULL) {
    words_put(body, (uint64_t)TRITONSERVER_ErrorCode(error));
    words_put(body, 0);
    words_put_text(body, TRITONSERVER_ErrorMessage(error));
    outputs_free(response->first);
  } else {
    conch_result* result = conch_alloc(sizeof *result);
    result->first = response->first;
    words_put(body, NO_CODE);
    words_put(body, (uint64_t)(uintptr_t)result);
    words_put_parameters(body, response->parameters);
    words_put(body, response->output_count);
    for (const TRITONBACKEND_Output* each = response->first; each != NULL; each = each->next) {
      words_put_output(body, each);
      event->held += sizeof *each + each->attributes.size;
    }
  }
  life_respond(life, event, final);
  response_end(response);
  return NO_ERROR;
}

/* --- Factories --------------------------------------------------------------------------------------------- */

TRITONSERVER_Error* TRITONBACKEND_ResponseFactoryNew(
    TRITONBACKEND_ResponseFactory** factory, TRITONBACKEND_Request* request) {
  *factory = NULL;
  if (request == NULL || atomic_load(&request->magic) != REQUEST_LIVE)
    return conch_error(TRITONSERVER_ERROR_INVALID_ARG, "a response factory needs a request that was not released");
  *factory = conch_alloc(sizeof **factory);
  (*factory)->life = life_hold(request->life);
  atomic_fetch_add(&request->life->producers, 1);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ResponseFactoryDelete(TRITONBACKEND_ResponseFactory* factory) {
  if (factory == NULL) return NO_ERROR;
  life_t* life = factory->life;
  free(factory);
  atomic_fetch_sub(&life->producers, 1);
  life_check(life);
  life_drop(life);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ResponseFactorySendFlags(TRITONBACKEND_ResponseFactory* factory, uint32_t flags) {
  life_t* life = factory->life;
  if ((flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL) == 0) return NO_ERROR;
  if (atomic_load(&life->final)) return NO_ERROR;
  event_t* event = event_new(CONCH_RESPONSE, life->number);
  words_put(&event->body, 2);
  words_put(&event->body, NO_CODE);
  words_put(&event->body, 0);
  life_respond(life, event, true);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ResponseFactoryIsCancelled(
    TRITONBACKEND_ResponseFactory* factory, bool* is_cancelled) {
  *is_cancelled = atomic_load(&factory->life->cancelled);
  return NO_ERROR;
}

/* --- States ------------------------------------------------------------------------------------------------ */

TRITONSERVER_Error* TRITONBACKEND_StateNew(
    TRITONBACKEND_State** state, TRITONBACKEND_Request* request, const char* name, TRITONSERVER_DataType datatype,
    const int64_t* dims, uint32_t rank) {
  *state = NULL;
  if (request == NULL || atomic_load(&request->magic) != REQUEST_LIVE)
    return conch_error(TRITONSERVER_ERROR_INVALID_ARG, "a state needs a request that was not released");
  const TRITONBACKEND_Model* model = &request->life->host->model;
  if (model->state_count == 0)
    return conch_error(
        TRITONSERVER_ERROR_INVALID_ARG,
        "unable to add state '%s'. State configuration is missing for model '%s'.", name, model->name);
  uint32_t index = 0;
  while (index < model->state_count && strcmp(model->outputs[model->output_count + index], name) != 0) index++;
  if (index == model->state_count)
    return conch_error(TRITONSERVER_ERROR_INVALID_ARG, "state '%s' is not a valid state name.", name);
  TRITONBACKEND_State* made = conch_alloc(sizeof *made);
  made->request = request;
  made->output = output_new(name, datatype, dims, rank);
  made->output->index = model->output_count + index;
  made->next = request->states;
  request->states = made;
  *state = made;
  return NO_ERROR;
}

void states_free(TRITONBACKEND_State* first) {
  while (first != NULL) {
    TRITONBACKEND_State* next = first->next;
    outputs_free(first->output);
    free(first);
    first = next;
  }
}

TRITONSERVER_Error* TRITONBACKEND_StateBuffer(
    TRITONBACKEND_State* state, void** buffer, uint64_t size, TRITONSERVER_MemoryType* memory_type, int64_t* id) {
  *buffer = NULL;
  TRITONBACKEND_Output* output = state->output;
  if (output == NULL) return conch_error(TRITONSERVER_ERROR_INVALID_ARG, "the state was updated before");
  if (!output->allocated || output->attributes.size != size) {
    free(output->buffer);
    output->buffer = NULL;
    TRITONSERVER_Error* error = allocate(output, size);
    if (error != NULL) return error;
  }
  *buffer = output->buffer;
  *memory_type = TRITONSERVER_MEMORY_CPU;
  *id = 0;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_StateBufferAttributes(
    TRITONBACKEND_State* state, TRITONSERVER_BufferAttributes** attributes) {
  if (state->output == NULL) return conch_error(TRITONSERVER_ERROR_INVALID_ARG, "the state was updated before");
  *attributes = &state->output->attributes;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_StateUpdate(TRITONBACKEND_State* state) {
  TRITONBACKEND_Output* output = state->output;
  if (output == NULL) return conch_error(TRITONSERVER_ERROR_INVALID_ARG, "the state was updated before");
  state->output = NULL;
  life_t* life = state->request->life;
  conch_result* result = conch_alloc(sizeof *result);
  result->first = output;
  event_t* event = event_new(CONCH_STATE, life->number);
  words_put(&event->body, (uint64_t)(uintptr_t)result);
  words_put_output(&event->body, output);
  life_add_state(life, event);
  return NO_ERROR;
}

/* --- Statistics of responses ------------------------------------------------------------------------------- */

/* They are accepted, and not shown: conch counts responses itself. */
struct TRITONBACKEND_ModelInstanceResponseStatistics {
  TRITONBACKEND_ModelInstance* instance;
};

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceResponseStatisticsNew(
    TRITONBACKEND_ModelInstanceResponseStatistics** statistics) {
  *statistics = conch_alloc(sizeof **statistics);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceResponseStatisticsDelete(
    TRITONBACKEND_ModelInstanceResponseStatistics* statistics) {
  free(statistics);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceResponseStatisticsSetModelInstance(
    TRITONBACKEND_ModelInstanceResponseStatistics* statistics, TRITONBACKEND_ModelInstance* instance) {
  statistics->instance = instance;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseFactory(
    TRITONBACKEND_ModelInstanceResponseStatistics* statistics, TRITONBACKEND_ResponseFactory* factory) {
  (void)statistics;
  (void)factory;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseStart(
    TRITONBACKEND_ModelInstanceResponseStatistics* statistics, uint64_t response_start) {
  (void)statistics;
  (void)response_start;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceResponseStatisticsSetComputeOutputStart(
    TRITONBACKEND_ModelInstanceResponseStatistics* statistics, uint64_t compute_output_start) {
  (void)statistics;
  (void)compute_output_start;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseEnd(
    TRITONBACKEND_ModelInstanceResponseStatistics* statistics, uint64_t response_end) {
  (void)statistics;
  (void)response_end;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceResponseStatisticsSetError(
    TRITONBACKEND_ModelInstanceResponseStatistics* statistics, TRITONSERVER_Error* error) {
  (void)statistics;
  (void)error;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReportResponseStatistics(
    TRITONBACKEND_ModelInstanceResponseStatistics* statistics) {
  (void)statistics;
  return NO_ERROR;
}
