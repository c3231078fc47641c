/* Crashes in the entry point that the model's parameter "where" names, in the way that "how" names; else OUT is IN
 * and OFFSET. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "triton/core/tritonbackend.h"

#ifndef OFFSET
#define OFFSET 0
#endif

static char where[64], how[64];

static void read_parameter(const char* config, const char* name, char to[64]) {
  const char* at = strstr(config, name);
  if (at == NULL) return;
  at = strstr(at, "\"string_value\"");
  if (at == NULL) return;
  at = strchr(strchr(at, ':'), '"') + 1;
  size_t size = strcspn(at, "\"");
  memcpy(to, at, size < 63 ? size : 63);
}

static void crash_in(const char* entry) {
  if (strcmp(where, entry) != 0) return;
  if (strcmp(how, "abort") == 0) abort();
  if (strcmp(how, "exit") == 0) exit(7);
  if (strcmp(how, "kill") == 0) kill(getpid(), SIGKILL);
  *(volatile int*)0 = 1;
}

static TRITONSERVER_Error* read_config(TRITONBACKEND_Model* model) {
  TRITONSERVER_Message* config;
  const char* text;
  size_t size;
  TRITONSERVER_Error* error = TRITONBACKEND_ModelConfig(model, 1, &config);
  if (error != NULL) return error;
  TRITONSERVER_ErrorDelete(TRITONSERVER_MessageSerializeToJson(config, &text, &size));
  read_parameter(text, "\"where\"", where);
  read_parameter(text, "\"how\"", how);
  return TRITONSERVER_MessageDelete(config);
}

TRITONSERVER_Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend* backend) {
  TRITONSERVER_Message* config;
  const char* text;
  size_t size;
  TRITONSERVER_ErrorDelete(TRITONBACKEND_BackendConfig(backend, &config));
  TRITONSERVER_ErrorDelete(TRITONSERVER_MessageSerializeToJson(config, &text, &size));
  if (strstr(text, "\"crash-in-initialize\"") != NULL) *(volatile int*)0 = 1;
  return NULL;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model) {
  TRITONSERVER_Error* error = read_config(model);
  crash_in("ModelInitialize");
  return error;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance* instance) {
  (void)instance;
  crash_in("ModelInstanceInitialize");
  return NULL;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReady(TRITONBACKEND_ModelInstance* instance) {
  (void)instance;
  crash_in("ModelInstanceReady");
  return NULL;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t count) {
  (void)instance;
  for (uint32_t i = 0; i < count; i++) {
    TRITONBACKEND_Input* input;
    TRITONBACKEND_Response* response;
    TRITONBACKEND_Output* output;
    TRITONSERVER_DataType datatype;
    const int64_t* dims;
    uint32_t rank;
    uint64_t size;
    const void* from;
    void* to;
    TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
    int64_t id = 0;
    TRITONSERVER_ErrorDelete(TRITONBACKEND_RequestInput(requests[i], "IN", &input));
    TRITONSERVER_ErrorDelete(TRITONBACKEND_InputProperties(input, NULL, &datatype, &dims, &rank, &size, NULL));
    TRITONSERVER_ErrorDelete(TRITONBACKEND_InputBuffer(input, 0, &from, &size, &type, &id));
    if (*(const int32_t*)from == 13) crash_in("ModelInstanceExecute");
    TRITONSERVER_ErrorDelete(TRITONBACKEND_ResponseNew(&response, requests[i]));
    TRITONSERVER_ErrorDelete(TRITONBACKEND_ResponseOutput(response, &output, "OUT", datatype, dims, rank));
    TRITONSERVER_ErrorDelete(TRITONBACKEND_OutputBuffer(output, &to, size, &type, &id));
    *(int32_t*)to = *(const int32_t*)from + OFFSET;
    TRITONSERVER_ErrorDelete(TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, NULL));
    TRITONSERVER_ErrorDelete(TRITONBACKEND_RequestRelease(requests[i], TRITONSERVER_REQUEST_RELEASE_ALL));
  }
  return NULL;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceFinalize(TRITONBACKEND_ModelInstance* instance) {
  (void)instance;
  crash_in("ModelInstanceFinalize");
  return NULL;
}

TRITONSERVER_Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model) {
  (void)model;
  crash_in("ModelFinalize");
  return NULL;
}

TRITONSERVER_Error* TRITONBACKEND_Finalize(TRITONBACKEND_Backend* backend) {
  (void)backend;
  crash_in("Finalize");
  return NULL;
}
