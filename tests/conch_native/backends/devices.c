/* A DEVICE_BLOCKING backend whose instances load in parallel. Responds with its thread, with the most batches that
 * ran at once on a GPU, with the instance's host policy, and with the processors that Execute and
 * InstanceInitialize may use.
 *
 * The config says what InstanceInitialize waits for: "together" until MEET instances load, "apart" for a while. */
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "triton/core/tritonbackend.h"

#define MEET 4
#define GPUS 8
#define TRY(call)                              \
  do {                                         \
    TRITONSERVER_Error* tried = (call);        \
    if (tried != NULL) return tried;           \
  } while (0)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int loading, met, running[GPUS], most[GPUS];

/* The processors of this thread, as bits. */
static int64_t processors(void) {
  cpu_set_t set;
  int64_t bits = 0;
  sched_getaffinity(0, sizeof set, &set);
  for (int i = 0; i < 63; i++)
    if (CPU_ISSET(i, &set)) bits |= (int64_t)1 << i;
  return bits;
}

TRITONSERVER_Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend* backend) {
  return TRITONBACKEND_BackendSetExecutionPolicy(backend, TRITONBACKEND_EXECUTION_DEVICE_BLOCKING);
}

TRITONSERVER_Error* TRITONBACKEND_GetBackendAttribute(
    TRITONBACKEND_Backend* backend, TRITONBACKEND_BackendAttribute* attributes) {
  (void)backend;
  return TRITONBACKEND_BackendAttributeSetParallelModelInstanceLoading(attributes, true);
}

static TRITONSERVER_Error* waits(TRITONBACKEND_ModelInstance* instance, const char* word, bool* yes) {
  TRITONBACKEND_Model* model;
  TRITONSERVER_Message* config;
  const char* text;
  size_t size;
  TRY(TRITONBACKEND_ModelInstanceModel(instance, &model));
  TRY(TRITONBACKEND_ModelConfig(model, 1, &config));
  TRY(TRITONSERVER_MessageSerializeToJson(config, &text, &size));
  *yes = memmem(text, size, word, strlen(word)) != NULL;
  return TRITONSERVER_MessageDelete(config);
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance* instance) {
  struct timespec until, moment = {0, 20000000};
  bool together, apart, alone = false;
  int64_t* state = malloc(sizeof *state);
  *state = processors();
  TRY(TRITONBACKEND_ModelInstanceSetState(instance, state));
  TRY(waits(instance, "together", &together));
  TRY(waits(instance, "apart", &apart));
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += 60;
  pthread_mutex_lock(&lock);
  if (++loading > met) met = loading;
  pthread_cond_broadcast(&changed);
  while (together && met < MEET && !alone) alone = pthread_cond_timedwait(&changed, &lock, &until) != 0;
  pthread_mutex_unlock(&lock);
  if (apart) nanosleep(&moment, NULL);
  pthread_mutex_lock(&lock);
  loading--;
  int at_once = met;
  pthread_mutex_unlock(&lock);
  if (alone) return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INTERNAL, "instances load one by one");
  if (apart && at_once > 1) return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INTERNAL, "instances load at once");
  return NULL;
}

static TRITONSERVER_Error* respond(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request* request, int64_t thread, int64_t at_once) {
  TRITONBACKEND_Response* response;
  TRITONSERVER_Message* policy;
  const char* text;
  size_t size;
  void* state;
  TRITONBACKEND_Output* output;
  void* buffer;
  TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
  int64_t id = 0, dims[] = {2}, values[] = {thread, at_once};
  TRY(TRITONBACKEND_ModelInstanceState(instance, &state));
  TRY(TRITONBACKEND_ModelInstanceHostPolicy(instance, &policy));
  TRY(TRITONSERVER_MessageSerializeToJson(policy, &text, &size));
  TRY(TRITONBACKEND_ResponseNew(&response, request));
  TRY(TRITONBACKEND_ResponseSetStringParameter(response, "policy", text));
  TRY(TRITONBACKEND_ResponseSetIntParameter(response, "executes_on", processors()));
  TRY(TRITONBACKEND_ResponseSetIntParameter(response, "loaded_on", *(int64_t*)state));
  TRY(TRITONBACKEND_ResponseOutput(response, &output, "OUT", TRITONSERVER_TYPE_INT64, dims, 1));
  TRY(TRITONBACKEND_OutputBuffer(output, &buffer, sizeof values, &type, &id));
  memcpy(buffer, values, sizeof values);
  TRY(TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, NULL));
  return TRITONBACKEND_RequestRelease(request, TRITONSERVER_REQUEST_RELEASE_ALL);
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t count) {
  struct timespec moment = {0, 1000000};
  int32_t device;
  TRITONSERVER_InstanceGroupKind kind;
  TRY(TRITONBACKEND_ModelInstanceDeviceId(instance, &device));
  TRY(TRITONBACKEND_ModelInstanceKind(instance, &kind));
  if (kind != TRITONSERVER_INSTANCEGROUPKIND_GPU) device = GPUS - 1;
  pthread_mutex_lock(&lock);
  if (++running[device] > most[device]) most[device] = running[device];
  pthread_mutex_unlock(&lock);
  nanosleep(&moment, NULL);
  pthread_mutex_lock(&lock);
  running[device]--;
  int at_once = most[device];
  pthread_mutex_unlock(&lock);
  for (uint32_t i = 0; i < count; i++) TRY(respond(instance, requests[i], syscall(SYS_gettid), at_once));
  return NULL;
}
