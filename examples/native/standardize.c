/* The backend 'standardize': takes the mean from each row of a tensor, and divides the row by its standard deviation.
 *
 * Config: one FP32 input of one dimension, and one FP32 output of the same. Its name and that of the output may be
 * any. A model needs no files: its version directory may be empty.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "triton/core/tritonbackend.h"

/* Leaves a function with the error of a call, if it has one. */
#define TRY(call)                              \
  do {                                         \
    TRITONSERVER_Error* tried = (call);        \
    if (tried != NULL) return tried;           \
  } while (0)

static uint64_t now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static void scale_rows(const float* from, float* to, int64_t rows, int64_t length) {
  for (int64_t row = 0; row < rows; row++, from += length, to += length) {
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < length; i++) sum += from[i];
    const double mean = sum / (double)length;
    for (int64_t i = 0; i < length; i++) squares += (from[i] - mean) * (from[i] - mean);
    const double deviation = sqrt(squares / (double)length);
    for (int64_t i = 0; i < length; i++) to[i] = deviation > 0 ? (float)((from[i] - mean) / deviation) : 0;
  }
}

/* Fills a response. Its error becomes the request's. */
static TRITONSERVER_Error* answer(TRITONBACKEND_Request* request, TRITONBACKEND_Response* response) {
  TRITONBACKEND_Input* input;
  TRITONBACKEND_Output* output;
  TRITONSERVER_DataType datatype;
  const int64_t* shape;
  uint32_t rank;
  uint64_t size;
  TRY(TRITONBACKEND_RequestInputByIndex(request, 0, &input));
  TRY(TRITONBACKEND_InputProperties(input, NULL, &datatype, &shape, &rank, &size, NULL));
  if (datatype != TRITONSERVER_TYPE_FP32 || rank == 0)
    return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INVALID_ARG, "'standardize' takes an FP32 tensor of rows");

  const void* from;
  void* to;
  TRITONSERVER_MemoryType place = TRITONSERVER_MEMORY_CPU;
  int64_t device = 0;
  TRY(TRITONBACKEND_InputBuffer(input, 0, &from, &size, &place, &device));
  const char* name;
  TRY(TRITONBACKEND_RequestOutputName(request, 0, &name));
  TRY(TRITONBACKEND_ResponseOutput(response, &output, name, datatype, shape, rank));
  TRY(TRITONBACKEND_OutputBuffer(output, &to, size, &place, &device));
  const int64_t length = shape[rank - 1];
  if (length > 0) scale_rows(from, to, (int64_t)(size / sizeof(float)) / length, length);
  return NULL;
}

TRITONSERVER_Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend* backend) {
  uint32_t major, minor;
  (void)backend;
  TRY(TRITONBACKEND_ApiVersion(&major, &minor));
  if (major != TRITONBACKEND_API_VERSION_MAJOR || minor < 1)
    return TRITONSERVER_ErrorNew(
        TRITONSERVER_ERROR_UNSUPPORTED, "triton backend API version does not support this backend");
  return NULL;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t request_count) {
  const uint64_t start = now_ns();
  uint64_t rows = 0;
  /* From the first response on, the requests are the backend's: no error may leave this function any more. */
  for (uint32_t i = 0; i < request_count; i++) {
    TRITONBACKEND_Response* response;
    TRITONSERVER_Error* failed = TRITONBACKEND_ResponseNew(&response, requests[i]);
    TRITONSERVER_Error* error = failed == NULL ? answer(requests[i], response) : NULL;
    TRITONSERVER_ErrorDelete(
        TRITONBACKEND_ModelInstanceReportStatistics(
            instance, requests[i], error == NULL, start, start, now_ns(), now_ns()));
    if (failed == NULL)
      TRITONSERVER_ErrorDelete(TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, error));
    TRITONSERVER_ErrorDelete(failed);
    TRITONSERVER_ErrorDelete(error);
    TRITONSERVER_ErrorDelete(TRITONBACKEND_RequestRelease(requests[i], TRITONSERVER_REQUEST_RELEASE_ALL));
    rows++;
  }
  const uint64_t end = now_ns();
  TRITONSERVER_ErrorDelete(
      TRITONBACKEND_ModelInstanceReportBatchStatistics(instance, rows, start, start, end, end));
  return NULL;
}
