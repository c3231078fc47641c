/* What the files of the C host share. See conch_host.h for the whole. */
#ifndef CONCH_INTERNAL_H
#define CONCH_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "conch_host.h"
#include "triton/core/tritonbackend.h"
#include "triton/core/tritonserver.h"

#define NO_ERROR ((TRITONSERVER_Error*)NULL)
#define NO_CODE UINT64_MAX

/* Makes an error with a formatted text. */
TRITONSERVER_Error* conch_error(TRITONSERVER_Error_Code code, const char* format, ...)
    __attribute__((format(printf, 2, 3), nonnull(2)));
/* The error of a function that conch does not provide. */
TRITONSERVER_Error* conch_unsupported(const char* function);

/* Memory of other types than CPU. */
TRITONSERVER_Error* conch_allocate_device(
    void** buffer, TRITONSERVER_MemoryType type, int64_t id, uint64_t size);
TRITONSERVER_Error* conch_free_device(void* buffer, TRITONSERVER_MemoryType type, int64_t id);
/* Takes an error: keeps its text for `conch_error_text`, and returns its code. */
int32_t conch_take_error(TRITONSERVER_Error* error);

/* Allocation that never fails: without memory the process ends, and conch starts another. */
void* conch_alloc(size_t size);
void* conch_realloc(void* memory, size_t size);
char* conch_copy(const char* text);
char* conch_copy_bytes(const void* bytes, size_t size);

struct TRITONSERVER_Message {
  char* text;
  size_t size;
};
TRITONSERVER_Message* conch_message(const char* text);
/* Replaces the text of a message. */
void conch_set_message(TRITONSERVER_Message* message, const char* text);

struct TRITONSERVER_BufferAttributes {
  TRITONSERVER_MemoryType type;
  int64_t id;
  size_t size;
  void* ipc_handle;
};

struct TRITONSERVER_Parameter {
  char* name;
  TRITONSERVER_ParameterType type;
  union {
    char* text;
    int64_t number;
    double real;
    bool truth;
    const void* bytes;
  } value;
  uint64_t size; /* of BYTES */
  struct TRITONSERVER_Parameter* next;
};
/* What a getter gives as the value: the text, the bytes, or a pointer to the number. */
const void* conch_parameter_value(const TRITONSERVER_Parameter* parameter);
void conch_free_parameters(TRITONSERVER_Parameter* first);
TRITONSERVER_Parameter* conch_parameter_at(TRITONSERVER_Parameter* first, uint32_t index);
uint32_t conch_parameter_count(const TRITONSERVER_Parameter* first);

/* --- Words ------------------------------------------------------------------------------------------------- */

/* A growing array of words. */
typedef struct {
  uint64_t* words;
  size_t count, room;
} words_t;
void words_put(words_t* to, uint64_t word);
void words_put_real(words_t* to, double value);
void words_put_text(words_t* to, const char* text);
void words_put_bytes(words_t* to, const void* bytes, size_t size);
/* As `words_put_bytes` without the length. */
void words_put_padded(words_t* to, const void* bytes, size_t size);
void words_put_dims(words_t* to, const int64_t* dims, uint32_t rank);
void words_put_parameters(words_t* to, const TRITONSERVER_Parameter* first);
/* Reads a text, which need not end with a NUL, and moves behind it. */
const char* words_text(const uint64_t** at, uint64_t* size);
TRITONSERVER_Parameter* words_parameters(const uint64_t** at);

/* --- Events ------------------------------------------------------------------------------------------------ */

typedef struct event {
  struct event* next;
  TRITONSERVER_Metric* metric; /* its change is read when the event is taken */
  size_t held;                 /* bytes of the result that it brings */
  size_t cost;                 /* bytes that it takes of the queue */
  words_t body;                /* the first word is the length */
} event_t;

typedef struct {
  event_t *first, *last;
} event_list_t;

typedef struct life life_t;

/* Places of words in events. */
enum { RESPONSE_RESULT = 5, STATE_RESULT = 3 };

event_t* event_new(enum conch_event kind, uint64_t number);
void event_append(event_list_t* list, event_t* event);
/* More than 0 on threads of the worker that must not wait for the one in `conch_wait`. */
extern _Thread_local int conch_in_worker;
/* Waits while too much is queued for the thread in `conch_wait`; call it without locks. */
void event_wait_for_room(conch_host* host);
/* Gives an event to the thread in `conch_wait`. */
void event_post(conch_host* host, event_t* event);
void event_post_all(conch_host* host, event_list_t events);
/* Gives events of a request to its batch while that runs, else to the thread in `conch_wait`. The latter gets
 * all that are `ordered`. */
void event_post_of(const life_t* life, event_list_t events, bool ordered);
void event_note(conch_host* host, uint64_t number, const char* format, ...) __attribute__((format(printf, 3, 4)));
/* Moves whole events to `out`, and adds what they cost; returns the words. Those of the first event if that does
 * not fit. */
uint64_t event_take(event_list_t* list, uint64_t* out, uint64_t room, size_t* cost);
/* Moves a list behind another one. */
void event_append_all(event_list_t* list, event_list_t events);
/* Drops events and what they hold. */
void event_free_all(event_list_t* list);

/* --- Objects ----------------------------------------------------------------------------------------------- */

typedef struct conch_call conch_call_t;

typedef struct {
  TRITONSERVER_InstanceGroupKind kind;
  uint64_t count;
  uint64_t* ids;
  uint64_t id_count;
} preferred_t;

struct TRITONBACKEND_BackendAttribute {
  preferred_t* groups;
  size_t group_count;
  bool parallel;
};

struct TRITONBACKEND_MemoryManager {
  int unused;
};

struct TRITONSERVER_Server {
  conch_host* host;
};

struct TRITONBACKEND_Backend {
  conch_host* host;
  char* name;
  char* directory;
  TRITONSERVER_Message* config;
  TRITONBACKEND_ExecutionPolicy policy;
  TRITONBACKEND_BackendAttribute attributes;
  TRITONBACKEND_MemoryManager manager;
  void* state;
};

struct TRITONBACKEND_Model {
  conch_host* host;
  char* name;
  char* directory;
  uint64_t version;
  TRITONSERVER_Message* config;
  bool complete, decoupled, iterative, initializing;
  conch_on_config on_config;
  char** outputs; /* of the config, then of states */
  uint32_t output_count, state_count;
  void* state;
};

struct TRITONBACKEND_ModelInstance {
  conch_host* host;
  char* name;
  TRITONSERVER_InstanceGroupKind kind;
  int32_t device;
  bool passive;
  TRITONSERVER_Message* policy;
  char** profiles;
  uint32_t profile_count;
  void* state;
  pthread_mutex_t lock; /* guards what follows */
  bool executing;
  uint64_t batch; /* counts them */
  event_list_t events, left; /* `left` is of a batch that has ended; only the executing thread uses it */
  uint64_t compute_start, compute_end;
};

typedef TRITONSERVER_Error* (*entry_t)(void*);
typedef TRITONSERVER_Error* (*entry2_t)(void*, void*);
typedef TRITONSERVER_Error* (*execute_t)(TRITONBACKEND_ModelInstance*, TRITONBACKEND_Request**, const uint32_t);

struct conch_host {
  void* library;
  char* facts;
  TRITONBACKEND_Backend backend;
  TRITONBACKEND_Model model;
  TRITONBACKEND_ModelInstance** instances;
  uint32_t instance_count;
  pthread_mutex_t instances_lock; /* guards both while instances open */
  TRITONSERVER_Server server;
  entry_t initialize, finalize, model_initialize, model_finalize, instance_initialize, instance_finalize, ready;
  entry2_t get_attribute;
  execute_t execute;

  pthread_mutex_t lock; /* guards the events and the wake-up */
  pthread_cond_t arrived, room;
  event_list_t events;
  size_t queued; /* bytes of the events */
  bool woken, waiting;
  bool served; /* a thread has come to wait */

  pthread_mutex_t lives_lock; /* guards the table */
  life_t** lives;             /* by number */
  size_t life_slots, life_count;

  pthread_mutex_t calls_lock; /* guards the calls */
  conch_call_t* calls;
  uint64_t last_call;
};

extern _Atomic uint32_t conch_log_levels;
/* Log messages go to the newest host: a process has one, except in tests. */
extern conch_host* _Atomic conch_current;

/* What a request, its factories and its responses share; ends with the last of them. */
struct life {
  atomic_int references;
  conch_host* host;
  TRITONBACKEND_ModelInstance* instance;
  uint64_t number;
  uint64_t batch; /* of the instance, in which it runs or has run */
  char* id;       /* or NULL */
  bool filler;
  atomic_bool cancelled, final, released;
  atomic_int producers; /* factories and unsent responses */
  life_t* next;
  pthread_mutex_t lock; /* guards the states, and keeps a request's events in order */
  event_list_t states;  /* wait for the response */
};
life_t* life_open(TRITONBACKEND_ModelInstance* instance, uint64_t number, const char* id);
life_t* life_hold(life_t* life);
void life_drop(life_t* life);
/* Ends a request that nothing can answer any more. */
void life_check(life_t* life);
void life_cancel(conch_host* host, uint64_t number);
/* Keeps a state's event for the response; that of a decoupled model belongs to the outcome of the batch. */
void life_add_state(life_t* life, event_t* event);
/* The backend has done with the request. */
void life_release(life_t* life, bool again);
/* Posts a response's event, behind the states of its request. */
void life_respond(life_t* life, event_t* event, bool final);

typedef struct {
  char* name;
  TRITONSERVER_DataType datatype;
  uint32_t rank;
  int64_t* dims;
} tensor_t;

struct conch_layout {
  atomic_int references;
  uint32_t input_count, output_count;
  tensor_t* inputs;
  char** outputs;
};
void layout_drop(conch_layout* layout);

#define REQUEST_LIVE 0x5245514cu
#define REQUEST_DEAD 0x52455144u

struct TRITONBACKEND_Input {
  const tensor_t* tensor;
  const void* data;
  TRITONSERVER_BufferAttributes attributes;
};

struct TRITONBACKEND_Request {
  _Atomic uint32_t magic;
  life_t* life;
  conch_layout* layout;
  uint32_t flags;
  uint64_t correlation_id, timeout_us;
  char* correlation_text; /* or NULL */
  TRITONSERVER_Parameter* parameters;
  TRITONSERVER_InferenceTrace* trace; /* or NULL */
  TRITONBACKEND_State* states;
  TRITONBACKEND_Request* next_dead;
  TRITONBACKEND_Input inputs[];
};

struct TRITONSERVER_InferenceTrace {
  life_t* life;
  conch_host* host;
  uint64_t id, parent_id;
  char* context;
  bool owned; /* by the request */
};
void states_free(TRITONBACKEND_State* first);
void trace_free(TRITONSERVER_InferenceTrace* trace);

/* The change of a metric since it was taken last. */
event_t* metric_take(TRITONSERVER_Metric* metric);

#endif
