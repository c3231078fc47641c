/* Does with each request what its first input says, right or wrong, now or on a thread of its own.
 *
 * The input's first bytes: what, delay (0: in Execute), number of responses. See `enum what`.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "triton/core/tritonbackend.h"

enum what {
  ANSWER, RELEASE_FIRST, MANY, NEVER, RELEASE_TWICE, AFTER_FINAL, FAIL, DELETE, STATE, TALK, FAIL_BATCH, AGAIN, WHATS
};

typedef struct job {
  TRITONBACKEND_Request* request;
  unsigned char what, delay, count;
} job_t;

static TRITONSERVER_MetricFamily* family;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t ended = PTHREAD_COND_INITIALIZER;
static int running;

static void ignore(TRITONSERVER_Error* error) { TRITONSERVER_ErrorDelete(error); }

static void respond(TRITONBACKEND_Response* response, const char* fill, uint32_t flags, TRITONSERVER_Error* error) {
  TRITONBACKEND_Output* output;
  int64_t dims[2] = {1, 8};
  void* buffer;
  TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_GPU;
  int64_t id = 1;
  ignore(TRITONBACKEND_ResponseOutput(response, &output, "OUT", TRITONSERVER_TYPE_UINT8, dims, 2));
  ignore(TRITONBACKEND_OutputBuffer(output, &buffer, 8, &type, &id));
  memcpy(buffer, fill, 8);
  if (fill[0] == 'o') ignore(TRITONBACKEND_ResponseSetStringParameter(response, "key", "value"));
  ignore(TRITONBACKEND_ResponseSend(response, flags, error));
}

static void work(const job_t* job) {
  TRITONBACKEND_Request* request = job->request;
  TRITONBACKEND_Response* response;
  TRITONBACKEND_ResponseFactory* factory;
  const uint32_t final = TRITONSERVER_RESPONSE_COMPLETE_FINAL, all = TRITONSERVER_REQUEST_RELEASE_ALL;
  TRITONSERVER_Error* error = NULL;
  bool flag;
  switch (job->what) {
    case RELEASE_FIRST:
      ignore(TRITONBACKEND_ResponseNew(&response, request));
      ignore(TRITONBACKEND_RequestRelease(request, all));
      respond(response, "released", final, NULL);
      return;
    case MANY:
      ignore(TRITONBACKEND_ResponseFactoryNew(&factory, request));
      ignore(TRITONBACKEND_RequestRelease(request, all));
      for (int i = 0; i < job->count; i++) {
        ignore(TRITONBACKEND_ResponseFactoryIsCancelled(factory, &flag));
        ignore(TRITONBACKEND_ResponseNewFromFactory(&response, factory));
        respond(response, "one more", 0, NULL);
      }
      ignore(TRITONBACKEND_ResponseFactorySendFlags(factory, final));
      ignore(TRITONBACKEND_ResponseFactoryDelete(factory));
      return;
    case NEVER:
      break;
    case AFTER_FINAL:
      ignore(TRITONBACKEND_ResponseNew(&response, request));
      respond(response, "the last", final, NULL);
      ignore(TRITONBACKEND_ResponseNew(&response, request));
      respond(response, "too late", final, NULL);
      break;
    case FAIL:
      error = TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_UNAVAILABLE, "it fails");
      ignore(TRITONBACKEND_ResponseNew(&response, request));
      respond(response, "failure.", final, error);
      TRITONSERVER_ErrorDelete(error);
      break;
    case DELETE:
      ignore(TRITONBACKEND_ResponseNew(&response, request));
      ignore(TRITONBACKEND_ResponseDelete(response));
      ignore(TRITONBACKEND_ResponseNew(&response, request));
      respond(response, "deleted.", final, NULL);
      break;
    case STATE: {
      TRITONBACKEND_State* state;
      int64_t dims[1] = {2};
      void* buffer;
      TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
      int64_t id = 0;
      ignore(TRITONBACKEND_StateNew(&state, request, "STATE_OUT", TRITONSERVER_TYPE_INT64, dims, 1));
      ignore(TRITONBACKEND_StateBuffer(state, &buffer, 16, &type, &id));
      memset(buffer, 1, 16);
      if (job->count % 2) ignore(TRITONBACKEND_StateUpdate(state));
      ignore(TRITONBACKEND_StateUpdate(state));
      ignore(TRITONBACKEND_ResponseNew(&response, request));
      respond(response, "a state.", final, NULL);
      ignore(TRITONBACKEND_StateNew(&state, request, "STATE_OUT", TRITONSERVER_TYPE_INT64, dims, 1));
      break;
    }
    case TALK: {
      TRITONSERVER_Metric* metric;
      TRITONSERVER_Parameter* label = TRITONSERVER_ParameterNew("who", TRITONSERVER_PARAMETER_STRING, "chaos");
      const TRITONSERVER_Parameter* labels[] = {label};
      TRITONSERVER_LogMessage(TRITONSERVER_LOG_WARN, "/a/chaos.c", 1, "a warning");
      ignore(TRITONSERVER_MetricNew(&metric, family, labels, 1));
      ignore(TRITONSERVER_MetricIncrement(metric, 1));
      ignore(TRITONSERVER_MetricIncrement(metric, -1));
      ignore(TRITONSERVER_MetricDelete(metric));
      TRITONSERVER_ParameterDelete(label);
    } /* fall through */
    default:
      ignore(TRITONBACKEND_ResponseNew(&response, request));
      respond(response, "answered", final, NULL);
  }
  if (job->what == AGAIN) {
    error = TRITONBACKEND_RequestRelease(request, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE);
    if (error == NULL) return;
    TRITONSERVER_ErrorDelete(error);
  }
  ignore(TRITONBACKEND_RequestRelease(request, all));
  if (job->what == RELEASE_TWICE) ignore(TRITONBACKEND_RequestRelease(request, all));
}

static void* later(void* given) {
  job_t* job = given;
  struct timespec wait = {0, job->delay * 1000L};
  nanosleep(&wait, NULL);
  work(job);
  free(job);
  pthread_mutex_lock(&lock);
  running--;
  pthread_cond_signal(&ended);
  pthread_mutex_unlock(&lock);
  return NULL;
}

TRITONSERVER_Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend* backend) {
  (void)backend;
  return TRITONSERVER_MetricFamilyNew(&family, TRITONSERVER_METRIC_KIND_COUNTER, "chaos_total", "Requests.");
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t count) {
  job_t jobs[64];
  for (uint32_t i = 0; i < count; i++) {
    TRITONBACKEND_Input* input;
    const void* data;
    uint64_t size;
    TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
    int64_t id = 0;
    TRITONSERVER_Error* error = TRITONBACKEND_RequestInput(requests[i], "IN", &input);
    if (error == NULL) error = TRITONBACKEND_InputBuffer(input, 0, &data, &size, &type, &id);
    if (error != NULL) return error;
    const unsigned char* bytes = data;
    jobs[i] = (job_t){requests[i], bytes[0] % WHATS, bytes[1], bytes[2] % 8};
    if (jobs[i].what == FAIL_BATCH)
      return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INVALID_ARG, "the batch fails");
  }
  for (uint32_t i = 0; i < count; i++) {
    job_t* job = &jobs[i];
    if (job->delay == 0) {
      work(job);
      continue;
    }
    job_t* own = malloc(sizeof *own);
    *own = *job;
    pthread_t thread;
    pthread_mutex_lock(&lock);
    running++;
    pthread_mutex_unlock(&lock);
    pthread_create(&thread, NULL, later, own);
    pthread_detach(thread);
  }
  return TRITONBACKEND_ModelInstanceReportBatchStatistics(instance, count, 1, 2, 3, 4);
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceFinalize(TRITONBACKEND_ModelInstance* instance) {
  (void)instance;
  pthread_mutex_lock(&lock);
  while (running) pthread_cond_wait(&ended, &lock);
  pthread_mutex_unlock(&lock);
  return NULL;
}

TRITONSERVER_Error* TRITONBACKEND_Finalize(TRITONBACKEND_Backend* backend) {
  (void)backend;
  return TRITONSERVER_MetricFamilyDelete(family);
}
