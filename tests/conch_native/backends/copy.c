/* OUT is IN. With the macro SPIN_NS each request first computes for so long. */
#include <string.h>
#include <time.h>

#include "triton/core/tritonbackend.h"

#define TRY(call)                              \
  do {                                         \
    TRITONSERVER_Error* tried = (call);        \
    if (tried != NULL) return tried;           \
  } while (0)

static void spin(void) {
#ifdef SPIN_NS
  struct timespec begin, now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
  do clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  while ((now.tv_sec - begin.tv_sec) * 1000000000 + (now.tv_nsec - begin.tv_nsec) < SPIN_NS);
#endif
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t count) {
  for (uint32_t i = 0; i < count; i++) {
    TRITONBACKEND_Response* response;
    TRITONBACKEND_Input* input;
    TRITONBACKEND_Output* output;
    TRITONSERVER_DataType datatype;
    const int64_t* dims;
    uint32_t rank;
    uint64_t size;
    const void* from;
    void* to;
    TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
    int64_t id = 0;
    spin();
    TRY(TRITONBACKEND_ResponseNew(&response, requests[i]));
    TRY(TRITONBACKEND_RequestInput(requests[i], "IN", &input));
    TRY(TRITONBACKEND_InputProperties(input, NULL, &datatype, &dims, &rank, &size, NULL));
    TRY(TRITONBACKEND_InputBuffer(input, 0, &from, &size, &type, &id));
    TRY(TRITONBACKEND_ResponseOutput(response, &output, "OUT", datatype, dims, rank));
    TRY(TRITONBACKEND_OutputBuffer(output, &to, size, &type, &id));
    memcpy(to, from, size);
    TRY(TRITONBACKEND_ModelInstanceReportStatistics(instance, requests[i], true, 1, 2, 3, 4));
    TRY(TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, NULL));
    TRY(TRITONBACKEND_RequestRelease(requests[i], TRITONSERVER_REQUEST_RELEASE_ALL));
  }
  return NULL;
}
