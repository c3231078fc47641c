// A client of conch in C++: unary and streamed inference, model control, TLS and shared memory.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "inference/grpc_service.grpc.pb.h"

namespace {

using Stub = inference::GRPCInferenceService::Stub;

constexpr char kUsage[] =
    "usage: client [--address HOST:PORT] [--root-cert FILE] "
    "unary | stream | load MODEL | unload MODEL | shared-memory";
constexpr size_t kCount = 16;  // elements of each tensor of the model `simple`
constexpr size_t kBytes = kCount * sizeof(int32_t);

// A context for one call.
struct Call : grpc::ClientContext {
  Call() { set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30)); }
};

void check(const grpc::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.error_message());
}

// Numbers as the protocol has them, on little-endian machines.
template <typename T>
std::string raw(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

std::string numbers(const char* raw) {
  int32_t values[kCount];
  std::memcpy(values, raw, kBytes);
  std::ostringstream text;
  for (size_t place = 0; place < kCount; ++place) text << (place ? " " : "") << values[place];
  return text.str();
}

// 0 to 15, and ones.
std::vector<std::string> vectors() {
  std::vector<int32_t> counted, ones(kCount, 1);
  for (size_t place = 0; place < kCount; ++place) counted.push_back(static_cast<int32_t>(place));
  return {raw(counted), raw(ones)};
}

void add_input(inference::ModelInferRequest& request, const std::string& name, const std::string& datatype,
               const std::vector<int64_t>& shape) {
  auto* input = request.add_inputs();
  input->set_name(name);
  input->set_datatype(datatype);
  input->mutable_shape()->Assign(shape.begin(), shape.end());
}

inference::ModelInferRequest simple_request() {
  inference::ModelInferRequest request;
  request.set_model_name("simple");
  for (const char* name : {"INPUT0", "INPUT1"}) add_input(request, name, "INT32", {1, kCount});
  return request;
}

// Sends one request and prints the sum of its two vectors.
void unary(Stub& conch) {
  inference::ModelInferRequest request = simple_request();
  for (const std::string& vector : vectors()) request.add_raw_input_contents(vector);
  inference::ModelInferResponse response;
  Call call;
  check(conch.ModelInfer(&call, request, &response));
  for (int place = 0; place < response.outputs_size(); ++place) {
    if (response.outputs(place).name() != "OUTPUT0") continue;
    std::cout << "unary: " << numbers(response.raw_output_contents(place).data()) << "\n";
  }
}

// Has a decoupled model write text, and prints each word as it comes.
void stream(Stub& conch) {
  const std::string prompt = "A";
  inference::ModelInferRequest request;
  request.set_model_name("word_chain");
  add_input(request, "prompt", "BYTES", {1});
  add_input(request, "max_words", "INT32", {1});
  request.add_raw_input_contents(raw<uint32_t>({static_cast<uint32_t>(prompt.size())}) + prompt);
  request.add_raw_input_contents(raw<int32_t>({5}));
  Call call;
  auto exchange = conch.ModelStreamInfer(&call);
  exchange->Write(request);
  exchange->WritesDone();  // The server ends the stream after the last response.
  inference::ModelStreamInferResponse message;
  std::string error;
  while (exchange->Read(&message)) {
    if (!message.error_message().empty()) {
      error = message.error_message();
      continue;
    }
    std::cout << "stream: " << message.infer_response().raw_output_contents(0).substr(4) << std::endl;
  }
  check(exchange->Finish());
  if (!error.empty()) throw std::runtime_error(error);
}

void print_ready(Stub& conch, const char* command, const std::string& model) {
  inference::ModelReadyRequest request;
  request.set_name(model);
  inference::ModelReadyResponse response;
  Call call;
  check(conch.ModelReady(&call, request, &response));
  std::cout << command << ": " << model << " is " << (response.ready() ? "ready" : "not ready") << "\n";
}

// Loads a model, or loads it again.
void load(Stub& conch, const std::string& model) {
  inference::RepositoryModelLoadRequest request;
  request.set_model_name(model);
  inference::RepositoryModelLoadResponse response;
  Call call;
  check(conch.RepositoryModelLoad(&call, request, &response));
  print_ready(conch, "load", model);
}

// Unloads a model.
void unload(Stub& conch, const std::string& model) {
  inference::RepositoryModelUnloadRequest request;
  request.set_model_name(model);
  inference::RepositoryModelUnloadResponse response;
  Call call;
  check(conch.RepositoryModelUnload(&call, request, &response));
  print_ready(conch, "unload", model);
}

// A shared-memory object, mapped; it ends with its owner.
class SharedMemory {
 public:
  SharedMemory(const std::string& key, size_t size) : key_(key), size_(size) {
    const int file = shm_open(key.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
    if (file < 0) throw std::system_error(errno, std::generic_category(), key);
    void* memory = MAP_FAILED;
    if (ftruncate(file, static_cast<off_t>(size)) == 0) {
      memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    const int reason = errno;
    close(file);
    if (memory == MAP_FAILED) {
      shm_unlink(key.c_str());
      throw std::system_error(reason, std::generic_category(), key);
    }
    data = static_cast<char*>(memory);
  }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory() {
    munmap(data, size_);
    shm_unlink(key_.c_str());
  }

  char* data;

 private:
  std::string key_;
  size_t size_;
};

// A shared-memory object that the server knows by a name.
class Region {
 public:
  Region(Stub& conch, const std::string& name, size_t size) : conch_(conch), name_(name) {
    inference::SystemSharedMemoryRegisterRequest request;
    request.set_name(name);
    request.set_key("/" + name);
    request.set_byte_size(size);
    inference::SystemSharedMemoryRegisterResponse response;
    Call call;
    check(conch.SystemSharedMemoryRegister(&call, request, &response));
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region() {
    inference::SystemSharedMemoryUnregisterRequest request;
    request.set_name(name_);
    inference::SystemSharedMemoryUnregisterResponse response;
    Call call;
    conch_.SystemSharedMemoryUnregister(&call, request, &response);
  }

  // Has a tensor of a request lie in the region.
  template <typename Tensor>
  void place(Tensor* tensor, size_t offset) const {
    auto& parameters = *tensor->mutable_parameters();
    parameters["shared_memory_region"].set_string_param(name_);
    parameters["shared_memory_offset"].set_int64_param(static_cast<int64_t>(offset));
    parameters["shared_memory_byte_size"].set_int64_param(kBytes);
  }

 private:
  Stub& conch_;
  std::string name_;
};

// As unary, with all tensors in a region of system shared memory: two inputs, then the output.
void shared_memory(Stub& conch) {
  const std::string name = "client-cpp-" + std::to_string(getpid());
  const SharedMemory memory("/" + name, 3 * kBytes);
  const Region region(conch, name, 3 * kBytes);
  inference::ModelInferRequest request = simple_request();
  const std::vector<std::string> contents = vectors();
  for (int place = 0; place < 2; ++place) {
    std::memcpy(memory.data + place * kBytes, contents[place].data(), kBytes);
    region.place(request.mutable_inputs(place), place * kBytes);
  }
  auto* output = request.add_outputs();
  output->set_name("OUTPUT0");
  region.place(output, 2 * kBytes);
  inference::ModelInferResponse response;
  Call call;
  check(conch.ModelInfer(&call, request, &response));
  std::cout << "shared-memory: " << numbers(memory.data + 2 * kBytes) << "\n";
}

std::unique_ptr<Stub> connect(const std::string& address, const std::string& root_cert) {
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  if (!root_cert.empty()) {
    std::ifstream file(root_cert);
    if (!file) throw std::runtime_error("can't read " + root_cert);
    grpc::SslCredentialsOptions options;
    options.pem_root_certs.assign(std::istreambuf_iterator<char>(file), {});
    credentials = grpc::SslCredentials(options);
  }
  return inference::GRPCInferenceService::NewStub(grpc::CreateChannel(address, credentials));
}

int run(std::vector<std::string> arguments) {
  std::string address = "localhost:8001", root_cert;
  while (arguments.size() > 1 && arguments[0].rfind("--", 0) == 0) {
    if (arguments[0] == "--address") {
      address = arguments[1];
    } else if (arguments[0] == "--root-cert") {
      root_cert = arguments[1];
    } else {
      break;
    }
    arguments.erase(arguments.begin(), arguments.begin() + 2);
  }
  const std::string command = arguments.empty() ? "" : arguments[0];
  const bool of_model = command == "load" || command == "unload";
  if (arguments.size() != (of_model ? 2 : 1) ||
      (!of_model && command != "unary" && command != "stream" && command != "shared-memory")) {
    std::cerr << kUsage << "\n";
    return 2;
  }
  const auto conch = connect(address, root_cert);
  if (command == "unary") unary(*conch);
  if (command == "stream") stream(*conch);
  if (command == "load") load(*conch, arguments[1]);
  if (command == "unload") unload(*conch, arguments[1]);
  if (command == "shared-memory") shared_memory(*conch);
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  try {
    return run({arguments + 1, arguments + count});
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 1;
  }
}
