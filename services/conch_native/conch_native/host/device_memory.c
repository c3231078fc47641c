/* Memory of GPUs, and host memory that GPUs copy from: by CUDA's driver, found when a backend first asks for any.
 *
 * Allocations are in the primary context of their device, which the runtime that a backend uses shares. */
#include <dlfcn.h>
#include <pthread.h>

#include "internal.h"

enum { SUCCESS = 0, INVALID_DEVICE = 101, PORTABLE = 1, MOST_DEVICES = 64 };

typedef void* context_t;
typedef unsigned long long address_t;

static struct {
  bool found;
  int (*init)(unsigned);
  int (*device_get)(int*, int);
  int (*context_retain)(context_t*, int);
  int (*context_push)(context_t);
  int (*context_pop)(context_t*);
  int (*allocate)(address_t*, size_t);
  int (*release)(address_t);
  int (*allocate_host)(void**, size_t, unsigned);
  int (*release_host)(void*);
  int (*error_text)(int, const char**);
  context_t contexts[MOST_DEVICES];
} driver;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void open_driver(void) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == NULL) return;
  struct {
    const char* name;
    void* target;
  } symbols[] = {
      {"cuInit", &driver.init},
      {"cuDeviceGet", &driver.device_get},
      {"cuDevicePrimaryCtxRetain", &driver.context_retain},
      {"cuCtxPushCurrent_v2", &driver.context_push},
      {"cuCtxPopCurrent_v2", &driver.context_pop},
      {"cuMemAlloc_v2", &driver.allocate},
      {"cuMemFree_v2", &driver.release},
      {"cuMemHostAlloc", &driver.allocate_host},
      {"cuMemFreeHost", &driver.release_host},
      {"cuGetErrorString", &driver.error_text},
  };
  for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
    void* address = dlsym(library, symbols[i].name);
    if (address == NULL) return;
    memcpy(symbols[i].target, &address, sizeof address);
  }
  driver.found = driver.init(0) == SUCCESS;
}

static const char* kind_of(TRITONSERVER_MemoryType type) {
  return type == TRITONSERVER_MEMORY_GPU ? "GPU" : "Pinned";
}

static TRITONSERVER_Error* failed(TRITONSERVER_MemoryType type, const char* what, int code) {
  const char* text = NULL;
  driver.error_text(code, &text);
  return conch_error(
      TRITONSERVER_ERROR_UNAVAILABLE, "%s memory %s failed: %s", kind_of(type), what,
      text == NULL ? "unknown error of the driver" : text);
}

/* Makes the context of a device current; it stays retained while the process lives. */
static int enter(int64_t id) {
  int device, code = SUCCESS;
  if (id < 0 || id >= MOST_DEVICES) return INVALID_DEVICE;
  pthread_mutex_lock(&lock);
  if (driver.contexts[id] == NULL) {
    code = driver.device_get(&device, (int)id);
    if (code == SUCCESS) code = driver.context_retain(&driver.contexts[id], device);
  }
  pthread_mutex_unlock(&lock);
  return code == SUCCESS ? driver.context_push(driver.contexts[id]) : code;
}

static void leave(void) {
  context_t context;
  driver.context_pop(&context);
}

TRITONSERVER_Error* conch_allocate_device(
    void** buffer, TRITONSERVER_MemoryType type, int64_t id, uint64_t size) {
  pthread_once(&once, open_driver);
  if (!driver.found)
    return conch_error(TRITONSERVER_ERROR_UNSUPPORTED, "%s memory allocation not supported", kind_of(type));
  int code = enter(id);
  if (code != SUCCESS) return failed(type, "allocation", code);
  if (type == TRITONSERVER_MEMORY_GPU) {
    address_t address = 0;
    code = driver.allocate(&address, size ? size : 1);
    *buffer = (void*)(uintptr_t)address;
  } else {
    code = driver.allocate_host(buffer, size ? size : 1, PORTABLE);
  }
  leave();
  return code == SUCCESS ? NO_ERROR : failed(type, "allocation", code);
}

TRITONSERVER_Error* conch_free_device(void* buffer, TRITONSERVER_MemoryType type, int64_t id) {
  pthread_once(&once, open_driver);
  if (!driver.found)
    return conch_error(TRITONSERVER_ERROR_UNSUPPORTED, "%s memory was not allocated here", kind_of(type));
  int code = enter(id);
  if (code != SUCCESS) return failed(type, "release", code);
  code = type == TRITONSERVER_MEMORY_GPU ? driver.release((address_t)(uintptr_t)buffer) : driver.release_host(buffer);
  leave();
  return code == SUCCESS ? NO_ERROR : failed(type, "release", code);
}
