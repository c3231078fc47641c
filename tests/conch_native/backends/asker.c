/* Answers the question in IN with what the server says. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "triton/core/tritonbackend.h"

#define TRY(call)                              \
  do {                                         \
    TRITONSERVER_Error* tried = (call);        \
    if (tried != NULL) return tried;           \
  } while (0)

static TRITONSERVER_Error* of_message(TRITONSERVER_Message* message, char** answer) {
  const char* text;
  size_t size;
  TRY(TRITONSERVER_MessageSerializeToJson(message, &text, &size));
  *answer = strndup(text, size);
  return TRITONSERVER_MessageDelete(message);
}

static TRITONSERVER_Error* of_metrics(TRITONSERVER_Server* server, char** answer) {
  TRITONSERVER_Metrics* metrics;
  const char* text;
  size_t size;
  TRY(TRITONSERVER_ServerMetrics(server, &metrics));
  TRY(TRITONSERVER_MetricsFormatted(metrics, TRITONSERVER_METRIC_PROMETHEUS, &text, &size));
  *answer = strndup(text, size);
  return TRITONSERVER_MetricsDelete(metrics);
}

/* Loads a model from a config and a file. */
static TRITONSERVER_Error* load(TRITONSERVER_Server* server) {
  const char *config = "{\"backend\": \"python\", \"max_batch_size\": 8}",
             *code = "class TritonPythonModel:\n    def execute(self, requests): return [None for _ in requests]\n";
  TRITONSERVER_Parameter* parameters[] = {
      TRITONSERVER_ParameterNew("config", TRITONSERVER_PARAMETER_STRING, config),
      TRITONSERVER_ParameterBytesNew("file:1/model.py", code, strlen(code))};
  const TRITONSERVER_Parameter* given[] = {parameters[0], parameters[1]};
  TRITONSERVER_Error* error = TRITONSERVER_ServerLoadModelWithParameters(server, "made", given, 2);
  for (int i = 0; i < 2; i++) TRITONSERVER_ParameterDelete(parameters[i]);
  return error;
}

/* The instance's policy belongs to the host. */
static TRITONSERVER_Error* of_policy(TRITONBACKEND_ModelInstance* instance, char** answer) {
  TRITONSERVER_Message* policy;
  const char* text;
  size_t size;
  TRY(TRITONBACKEND_ModelInstanceHostPolicy(instance, &policy));
  TRY(TRITONSERVER_MessageSerializeToJson(policy, &text, &size));
  *answer = strndup(text, size);
  return NULL;
}

/* Memory of each type, on a device. */
static TRITONSERVER_Error* of_memory(TRITONBACKEND_ModelInstance* instance, int64_t device) {
  TRITONBACKEND_Model* model;
  TRITONBACKEND_Backend* backend;
  TRITONBACKEND_MemoryManager* manager;
  void *host, *gpu;
  TRY(TRITONBACKEND_ModelInstanceModel(instance, &model));
  TRY(TRITONBACKEND_ModelBackend(model, &backend));
  TRY(TRITONBACKEND_BackendMemoryManager(backend, &manager));
  TRY(TRITONBACKEND_MemoryManagerAllocate(manager, &host, TRITONSERVER_MEMORY_CPU_PINNED, 0, 64));
  memset(host, 1, 64);
  TRITONSERVER_Error* error = TRITONBACKEND_MemoryManagerAllocate(manager, &gpu, TRITONSERVER_MEMORY_GPU, device, 64);
  if (error == NULL) error = TRITONBACKEND_MemoryManagerFree(manager, gpu, TRITONSERVER_MEMORY_GPU, device);
  TRY(TRITONBACKEND_MemoryManagerFree(manager, host, TRITONSERVER_MEMORY_CPU_PINNED, 0));
  return error;
}

static TRITONSERVER_Error* ask(
    TRITONBACKEND_ModelInstance* instance, TRITONSERVER_Server* server, const char* question, char** answer) {
  TRITONSERVER_Message* message = NULL;
  uint32_t flags = 0;
  bool yes = false;
  if (strcmp(question, "metrics") == 0) return of_metrics(server, answer);
  if (strcmp(question, "policy") == 0) return of_policy(instance, answer);
  if (strncmp(question, "memory ", 7) == 0) {
    TRY(of_memory(instance, atoi(question + 7)));
  } else if (strcmp(question, "load") == 0) {
    TRY(load(server));
    TRY(TRITONSERVER_ServerModelIsReady(server, "made", 1, &yes));
  } else if (strcmp(question, "unload") == 0) {
    TRY(TRITONSERVER_ServerUnloadModel(server, "made"));
  } else if (strcmp(question, "live") == 0) {
    TRY(TRITONSERVER_ServerIsLive(server, &yes));
  } else if (strcmp(question, "ready") == 0) {
    TRY(TRITONSERVER_ServerIsReady(server, &yes));
  } else if (strcmp(question, "batches") == 0) {
    TRY(TRITONSERVER_ServerModelBatchProperties(server, "inner", -1, &flags, NULL));
    yes = flags == TRITONSERVER_BATCH_UNKNOWN;
  } else if (strcmp(question, "server") == 0) {
    TRY(TRITONSERVER_ServerMetadata(server, &message));
  } else if (strcmp(question, "model") == 0) {
    TRY(TRITONSERVER_ServerModelMetadata(server, "inner", -1, &message));
  } else if (strcmp(question, "config") == 0) {
    TRY(TRITONSERVER_ServerModelConfig(server, "inner", -1, 1, &message));
  } else if (strcmp(question, "statistics") == 0) {
    TRY(TRITONSERVER_ServerModelStatistics(server, "inner", 1, &message));
  } else if (strcmp(question, "all statistics") == 0) {
    TRY(TRITONSERVER_ServerModelStatistics(server, "", -1, &message));
  } else if (strcmp(question, "index") == 0) {
    TRY(TRITONSERVER_ServerModelIndex(server, 0, &message));
  } else if (strcmp(question, "ready index") == 0) {
    TRY(TRITONSERVER_ServerModelIndex(server, TRITONSERVER_INDEX_FLAG_READY, &message));
  } else {
    TRY(TRITONSERVER_ServerModelStatistics(server, question, -1, &message));
  }
  if (message != NULL) return of_message(message, answer);
  *answer = strdup(yes ? "1" : "0");
  return NULL;
}

static TRITONSERVER_Error* run(
    TRITONBACKEND_ModelInstance* instance, TRITONSERVER_Server* server, TRITONBACKEND_Request* request) {
  TRITONBACKEND_Input* input;
  TRITONBACKEND_Response* response;
  TRITONBACKEND_Output* output;
  const void* data;
  void* buffer;
  uint64_t size;
  TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
  int64_t id = 0;
  TRY(TRITONBACKEND_RequestInput(request, "IN", &input));
  TRY(TRITONBACKEND_InputBuffer(input, 0, &data, &size, &type, &id));
  char *question = strndup(data, size), *answer = NULL;
  TRITONSERVER_Error* error = ask(instance, server, question, &answer);
  free(question);
  TRY(TRITONBACKEND_ResponseNew(&response, request));
  if (error == NULL) {
    int64_t dims[] = {1, (int64_t)strlen(answer)};
    TRY(TRITONBACKEND_ResponseOutput(response, &output, "OUT", TRITONSERVER_TYPE_UINT8, dims, 2));
    TRY(TRITONBACKEND_OutputBuffer(output, &buffer, strlen(answer), &type, &id));
    memcpy(buffer, answer, strlen(answer));
    free(answer);
  }
  TRY(TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, error));
  TRITONSERVER_ErrorDelete(error);
  return TRITONBACKEND_RequestRelease(request, TRITONSERVER_REQUEST_RELEASE_ALL);
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t count) {
  TRITONBACKEND_Model* model;
  TRITONSERVER_Server* server;
  TRY(TRITONBACKEND_ModelInstanceModel(instance, &model));
  TRY(TRITONBACKEND_ModelServer(model, &server));
  for (uint32_t i = 0; i < count; i++) TRY(run(instance, server, requests[i]));
  return NULL;
}
