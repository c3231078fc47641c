// Turns IN into upper case with C++: strings, containers, threads, exceptions. One of them leaves Execute if IN is
// "throw".
#include <cctype>
#include <cstring>
#include <exception>
#include <future>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "triton/core/tritonbackend.h"

namespace {

struct ErrorDeleter {
  void operator()(TRITONSERVER_Error* error) const { TRITONSERVER_ErrorDelete(error); }
};

// An error of the interface as an exception.
void check(TRITONSERVER_Error* error) {
  if (error == nullptr) return;
  std::unique_ptr<TRITONSERVER_Error, ErrorDeleter> owned(error);
  throw std::runtime_error(TRITONSERVER_ErrorMessage(owned.get()));
}

class Instance {
 public:
  // Each letter's case is changed on a thread; the counts are in a map.
  std::string upper(const std::string& text) {
    std::vector<std::future<std::string>> pieces;
    for (std::size_t at = 0; at < text.size(); at += 4) {
      pieces.push_back(std::async(std::launch::async, [piece = text.substr(at, 4)] {
        std::string changed;
        for (unsigned char letter : piece) {
          if (letter == '!') throw std::invalid_argument("'!' has no upper case");
          changed += static_cast<char>(std::toupper(letter));
        }
        return changed;
      }));
    }
    std::string whole;
    for (auto& piece : pieces) whole += piece.get();
    counts_[whole]++;
    return whole;
  }

  int count(const std::string& text) const { return counts_.at(text); }

 private:
  std::map<std::string, int> counts_;
};

std::string input_of(TRITONBACKEND_Request* request) {
  TRITONBACKEND_Input* input;
  const void* data;
  uint64_t size;
  TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
  int64_t id = 0;
  check(TRITONBACKEND_RequestInput(request, "IN", &input));
  check(TRITONBACKEND_InputBuffer(input, 0, &data, &size, &type, &id));
  return std::string(static_cast<const char*>(data), size);
}

void answer(TRITONBACKEND_Request* request, Instance& instance) {
  TRITONBACKEND_Response* response;
  check(TRITONBACKEND_ResponseNew(&response, request));
  std::unique_ptr<TRITONSERVER_Error, ErrorDeleter> failure;
  try {
    const std::string text = instance.upper(input_of(request));
    const int64_t dims[] = {1, static_cast<int64_t>(text.size())};
    TRITONBACKEND_Output* output;
    void* buffer;
    TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
    int64_t id = 0;
    check(TRITONBACKEND_ResponseOutput(response, &output, "OUT", TRITONSERVER_TYPE_UINT8, dims, 2));
    check(TRITONBACKEND_OutputBuffer(output, &buffer, text.size(), &type, &id));
    std::memcpy(buffer, text.data(), text.size());
    check(TRITONBACKEND_ResponseSetIntParameter(response, "count", instance.count(text)));
  } catch (const std::exception& error) {
    failure.reset(TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INVALID_ARG, error.what()));
  }
  check(TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, failure.get()));
  check(TRITONBACKEND_RequestRelease(request, TRITONSERVER_REQUEST_RELEASE_ALL));
}

}  // namespace

extern "C" {

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance* instance) {
  return TRITONBACKEND_ModelInstanceSetState(instance, new Instance);
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceFinalize(TRITONBACKEND_ModelInstance* instance) {
  void* state;
  check(TRITONBACKEND_ModelInstanceState(instance, &state));
  delete static_cast<Instance*>(state);
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t count) {
  void* state;
  check(TRITONBACKEND_ModelInstanceState(instance, &state));
  for (uint32_t i = 0; i < count; i++) {
    if (input_of(requests[i]) == "throw") throw std::runtime_error("thrown out of Execute");
    answer(requests[i], *static_cast<Instance*>(state));
  }
  return nullptr;
}

}  // extern "C"
