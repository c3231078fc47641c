/* A CUDA driver whose devices' memory is files: see cuda.py beside this.
 *
 * It is stricter than the real one wherever that may be: a handle is open once, copies happen when their stream
 * is waited for and not before, and an address of a device that is not in live memory is an error.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_DEVICE = 101, NO_CONTEXT = 201, MAPPED = 208, BAD_HANDLE = 400,
       ILLEGAL = 700 };
enum { MOST = 256, NAME = 44 };
#define SPACE ((size_t)1 << 36)

typedef struct { char magic[4]; int device; uint64_t size; int pid; char name[NAME]; } Handle;
typedef struct { char bytes[64]; } Raw;
typedef struct { char *pointer; size_t size; int device; char name[NAME]; } Memory;
typedef struct { uint64_t target, source; size_t size; } Copy;
typedef struct { int device; Copy copies[MOST]; int count; } Stream;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Memory memories[MOST];
static size_t used;
static char *base; /* of the addresses that devices have */
static int contexts[8]; /* only their addresses mean something */
static __thread int stack[16], depth;

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

static void path(char *into, const char *kind, const char *name) {
    const char *directory = getenv("FAKE_CUDA_DIR");
    snprintf(into, 512, "%s/%s%s", directory ? directory : "/nowhere", kind, name);
}

static void marked(char *into, const char *name) {
    char kind[64];
    snprintf(kind, sizeof kind, "open-%d-", getpid());
    path(into, kind, name);
}

/* A test makes a function fail by writing a code into a file with its name. */
static int failure(const char *function) {
    char file[512], text[16] = "";
    path(file, "fail-", function);
    int descriptor = open(file, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) return OK;
    ssize_t got = read(descriptor, text, sizeof text - 1);
    close(descriptor);
    return got > 0 ? atoi(text) : OK;
}
#define MAY_FAIL do { int failed = failure(__func__); if (failed) return failed; } while (0)
#define NEEDS_CONTEXT do { if (!depth) return NO_CONTEXT; } while (0)

static Memory *holding(uint64_t address, size_t size) {
    for (int i = 0; i < MOST; i++) {
        uint64_t start = (uint64_t)memories[i].pointer;
        if (start && address >= start && address + size <= start + memories[i].size) return &memories[i];
    }
    return NULL;
}

static int is_device(uint64_t address) {
    return base && address >= (uint64_t)base && address < (uint64_t)base + SPACE;
}

/* Called with the lock. */
static int map(int descriptor, size_t size, int device, const char *name, uint64_t *pointer) {
    if (!base) {
        void *space = mmap(NULL, SPACE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (space == MAP_FAILED) return NO_MEMORY;
        base = space;
    }
    for (int i = 0; i < MOST; i++) {
        if (memories[i].pointer) continue;
        int flags = descriptor < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
        char *place = mmap(base + used, size, PROT_READ | PROT_WRITE, flags | MAP_FIXED, descriptor, 0);
        if (place == MAP_FAILED) return NO_MEMORY;
        used += (size + 8191) / 4096 * 4096; /* never the same address twice, and a gap behind each */
        memories[i] = (Memory){place, size, device, ""};
        strncpy(memories[i].name, name, NAME - 1);
        *pointer = (uint64_t)place;
        return OK;
    }
    return NO_MEMORY;
}

static void unmap(Memory *memory) {
    mmap(memory->pointer, memory->size, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    memory->pointer = NULL;
}

int cuInit(unsigned flags) { return number("FAKE_CUDA_INIT", OK); }

int cuGetErrorString(int error, const char **text) {
    switch (error) {
    case INVALID: *text = "invalid argument"; break;
    case NO_MEMORY: *text = "out of memory"; break;
    case NO_DEVICE: *text = "invalid device ordinal"; break;
    case NO_CONTEXT: *text = "invalid device context"; break;
    case MAPPED: *text = "resource already mapped"; break;
    case BAD_HANDLE: *text = "invalid resource handle"; break;
    case ILLEGAL: *text = "an illegal memory access was encountered"; break;
    default: *text = NULL; return INVALID;
    }
    return OK;
}

int cuDeviceGetCount(int *count) { *count = number("FAKE_CUDA_GPUS", 2); return OK; }

int cuDeviceGet(int *device, int ordinal) {
    MAY_FAIL;
    if (ordinal < 0 || ordinal >= number("FAKE_CUDA_GPUS", 2)) return NO_DEVICE;
    *device = ordinal;
    return OK;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 : attribute == 115 ? number("FAKE_CUDA_POOLS", 1) : 0;
    return OK;
}

int cuDeviceGetUuid(char *uuid, int device) {
    MAY_FAIL;
    char text[32];
    const char *where = getenv("FAKE_CUDA_MACHINE");
    snprintf(text, sizeof text, "%s-GPU-%d", where ? where : "FAKE", device);
    memset(uuid, 0, 16);
    memcpy(uuid, text, strlen(text) < 16 ? strlen(text) : 16);
    return OK;
}

int cuDevicePrimaryCtxRetain(void **context, int device) { MAY_FAIL; *context = &contexts[device]; return OK; }

int cuCtxPushCurrent_v2(void *context) {
    if (depth == 16) return INVALID;
    stack[depth++] = (int)((int *)context - contexts);
    return OK;
}

int cuCtxPopCurrent_v2(void **context) {
    NEEDS_CONTEXT;
    *context = &contexts[stack[--depth]];
    return OK;
}

int cuStreamCreate(Stream **stream, unsigned flags) {
    NEEDS_CONTEXT;
    *stream = calloc(1, sizeof **stream);
    (*stream)->device = stack[depth - 1];
    return OK;
}

int cuStreamDestroy_v2(Stream *stream) { free(stream); return OK; }

int cuMemcpyAsync(uint64_t target, uint64_t source, size_t size, Stream *stream) {
    NEEDS_CONTEXT;
    MAY_FAIL;
    if (stream->device != stack[depth - 1]) return NO_CONTEXT;
    pthread_mutex_lock(&lock);
    int fits = stream->count < MOST;
    if (fits) stream->copies[stream->count++] = (Copy){target, source, size};
    pthread_mutex_unlock(&lock);
    return fits ? OK : NO_MEMORY;
}

int cuStreamSynchronize(Stream *stream) {
    NEEDS_CONTEXT;
    int result = failure(__func__);
    if (!stream) return result; /* nothing is ever left in the default stream */
    pthread_mutex_lock(&lock);
    for (int i = 0; i < stream->count && !result; i++) {
        Copy copy = stream->copies[i];
        if ((is_device(copy.target) && !holding(copy.target, copy.size)) ||
            (is_device(copy.source) && !holding(copy.source, copy.size))) result = ILLEGAL;
        else memmove((void *)copy.target, (void *)copy.source, copy.size);
    }
    stream->count = 0;
    pthread_mutex_unlock(&lock);
    return result;
}

int cuIpcOpenMemHandle_v2(uint64_t *pointer, Raw raw, unsigned flags) {
    NEEDS_CONTEXT;
    MAY_FAIL;
    Handle handle;
    char file[512], mark[512];
    memcpy(&handle, &raw, sizeof handle);
    if (memcmp(handle.magic, "FAKE", 4) || flags != 1) return INVALID;
    if (handle.pid == getpid()) return NO_CONTEXT;
    handle.name[NAME - 1] = 0;
    path(file, "", handle.name);
    marked(mark, handle.name);
    pthread_mutex_lock(&lock);
    int result = OK;
    for (int i = 0; i < MOST; i++)
        if (memories[i].pointer && !strcmp(memories[i].name, handle.name)) result = MAPPED;
    if (!result) {
        int descriptor = open(file, O_RDWR | O_CLOEXEC);
        result = descriptor < 0 ? BAD_HANDLE : map(descriptor, handle.size, handle.device, handle.name, pointer);
        if (descriptor >= 0) close(descriptor);
    }
    pthread_mutex_unlock(&lock);
    if (!result) close(open(mark, O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    return result;
}

int cuIpcCloseMemHandle(uint64_t pointer) {
    NEEDS_CONTEXT;
    MAY_FAIL;
    char mark[512];
    pthread_mutex_lock(&lock);
    Memory *memory = holding(pointer, 0);
    int found = memory && memory->name[0] && (uint64_t)memory->pointer == pointer;
    if (found) {
        marked(mark, memory->name);
        unmap(memory);
        unlink(mark);
    }
    pthread_mutex_unlock(&lock);
    return found ? OK : INVALID;
}

int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t pointer) {
    NEEDS_CONTEXT;
    MAY_FAIL;
    pthread_mutex_lock(&lock);
    Memory *memory = holding(pointer, 0);
    if (memory) { *base = (uint64_t)memory->pointer; *size = memory->size; }
    pthread_mutex_unlock(&lock);
    return memory ? OK : INVALID;
}

int cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) {
    MAY_FAIL;
    pthread_mutex_lock(&lock);
    Memory *memory = holding(pointer, 0);
    if (memory) *(int *)value = memory->device;
    pthread_mutex_unlock(&lock);
    return memory && attribute == 9 ? OK : INVALID;
}

/* What clients need, and models in workers, and the server does not. */
int cuMemAlloc_v2(uint64_t *pointer, size_t size) {
    NEEDS_CONTEXT;
    static int count;
    char file[512], name[NAME];
    pthread_mutex_lock(&lock);
    snprintf(name, sizeof name, "own-%d-%d", getpid(), count++);
    path(file, "", name);
    int descriptor = open(file, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    int result = descriptor < 0 || ftruncate(descriptor, size) ? NO_MEMORY
                                                                : map(descriptor, size, stack[depth - 1], name, pointer);
    if (descriptor >= 0) close(descriptor);
    pthread_mutex_unlock(&lock);
    return result;
}

int cuMemFree_v2(uint64_t pointer) {
    NEEDS_CONTEXT;
    char file[512];
    pthread_mutex_lock(&lock);
    Memory *memory = holding(pointer, 0);
    if (memory) {
        path(file, "", memory->name);
        unlink(file);
        unmap(memory);
    }
    pthread_mutex_unlock(&lock);
    return memory ? OK : INVALID;
}

int cuMemHostAlloc(void **pointer, size_t size, unsigned flags) {
    NEEDS_CONTEXT;
    MAY_FAIL;
    *pointer = malloc(size);
    return *pointer ? OK : NO_MEMORY;
}

int cuMemFreeHost(void *pointer) { NEEDS_CONTEXT; free(pointer); return OK; }

int cuIpcGetMemHandle(Raw *raw, uint64_t pointer) {
    NEEDS_CONTEXT;
    MAY_FAIL;
    char own[NAME];
    snprintf(own, sizeof own, "own-%d-", getpid());
    pthread_mutex_lock(&lock);
    Memory *memory = holding(pointer, 0);
    if (memory && strncmp(memory->name, own, strlen(own))) memory = NULL; /* of a pool, or not its own */
    if (memory) {
        Handle handle = {"FAKE", memory->device, memory->size, getpid(), ""};
        memcpy(handle.magic, "FAKE", 4);
        memcpy(handle.name, memory->name, NAME);
        memcpy(raw, &handle, sizeof handle);
    }
    pthread_mutex_unlock(&lock);
    return memory ? OK : INVALID;
}

#ifndef OLD
int cuMemAllocAsync(uint64_t *pointer, size_t size, Stream *stream) {
    NEEDS_CONTEXT;
    MAY_FAIL;
    pthread_mutex_lock(&lock);
    int result = map(-1, size, stack[depth - 1], "", pointer);
    pthread_mutex_unlock(&lock);
    return result;
}

int cuMemFreeAsync(uint64_t pointer, Stream *stream) {
    NEEDS_CONTEXT;
    MAY_FAIL;
    pthread_mutex_lock(&lock);
    Memory *memory = holding(pointer, 0);
    int found = memory && !memory->name[0] && (uint64_t)memory->pointer == pointer;
    if (found) unmap(memory);
    pthread_mutex_unlock(&lock);
    return found ? OK : INVALID;
}
#endif
