/* What conch's worker calls in the C host. One process serves one version of one model.
 *
 * Texts are UTF-8 and end with a NUL. Batches, requests and events are arrays of 64-bit words in this
 * machine's order, because the caller fills and reads each array with one call of Python's `struct`.
 * Texts and bytes inside an array are a word with their length in bytes, then the bytes, padded to words.
 *
 * Every function with a result `int32_t` returns CONCH_OK, or a TRITONSERVER_Error_Code whose text
 * `conch_error_text` has. Functions may be called by any thread unless said otherwise.
 */
#ifndef CONCH_HOST_H
#define CONCH_HOST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CONCH_INTERFACE 3
#define CONCH_OK (-1)

/* Most bytes of the outputs of a SMALL_RESPONSE, each padded to words. */
#define CONCH_SMALL 1024

#ifndef CONCH_API
#define CONCH_API __attribute__((visibility("default")))
#endif

typedef struct conch_host conch_host;
typedef struct conch_layout conch_layout;
typedef struct conch_result conch_result;

/* CONCH_INTERFACE of this library. */
CONCH_API uint32_t conch_interface(void);

/* The text of the last error on this thread, until its next call. */
CONCH_API const char* conch_error_text(void);

/* Writes the C stack of a fatal signal to standard error, and hands the signal on to who handled it before. */
CONCH_API void conch_report_crashes(void);

/* --- Opening and closing; one thread, except for instances ---------------------------------------------------- */

/* Opens a library, calls its Initialize, and asks for its attributes. `config` is what BackendConfig says.
 * On an error `*host` is NULL. */
CONCH_API int32_t conch_open(
    conch_host** host, const char* library, const char* directory, const char* name, const char* config);

/* What the library said of itself, as JSON: "preferred_groups": [{"kind", "count", "gpus"}],
 * "parallel_instances", "device_blocking", "ready" (whether it has ModelInstanceReady), "api_minor_missing". */
CONCH_API const char* conch_facts(conch_host* host);

/* Called by SetConfig with the config as the backend wants it. Returns CONCH_OK after `conch_set_config`, or a
 * code after `conch_fail`. */
typedef int32_t (*conch_on_config)(const char* config);

/* Makes the model: ModelInitialize. `outputs` are the names of the config's outputs and of the states' outputs:
 * the index of an output in events is its place there, and a later `conch_set_outputs` replaces them. */
CONCH_API int32_t conch_open_model(
    conch_host* host, const char* name, uint64_t version, const char* directory, const char* config,
    bool complete, bool decoupled, bool iterative, conch_on_config on_config);
CONCH_API int32_t conch_set_config(conch_host* host, const char* config);
CONCH_API int32_t conch_fail(int32_t code, const char* text);
CONCH_API void conch_set_outputs(conch_host* host, uint32_t count, const char* const* names, uint32_t states);

/* Makes instance number `index`, from 0 on; several threads may do so, and all are made before a batch runs. `kind`
 * is a TRITONSERVER_InstanceGroupKind, `policy` what HostPolicy says, `profiles` are `profile_count` names. */
CONCH_API int32_t conch_open_instance(
    conch_host* host, uint32_t index, const char* name, int32_t kind, int32_t device, bool passive,
    const char* policy, uint32_t profile_count, const char* const* profiles);

/* CONCH_OK if the instance says that it is ready. */
CONCH_API int32_t conch_ready(conch_host* host, uint32_t index);

/* Finalizes instances, model and backend, whose errors are logged. Events that come meanwhile are lost unless
 * another thread waits for them; the host's memory stays until the process ends. */
CONCH_API void conch_close(conch_host* host);

/* --- Requests ---------------------------------------------------------------------------------------------- */

/* What requests with the same tensors share: words
 *   count of inputs, then for each: TRITONSERVER_DataType, rank, dims..., name
 *   count of requested outputs, then the names
 * Freed with `conch_free_layout`; requests keep it alive. */
CONCH_API conch_layout* conch_new_layout(const uint64_t* words);
CONCH_API void conch_free_layout(conch_layout* layout);

/* Runs a batch on an instance; one batch at a time on each. `words` has for each of `count` requests:
 *   number, layout, flags (TRITONSERVER_RequestFlag), filler (0 or 1), correlation id, timeout in us,
 *   cancelled (0 or 1), words of the rarities that follow, rarities..., then for each input: address, size
 * Rarities, if there are any words of them:
 *   id, correlation text, trace context, count of parameters, then for each: TRITONSERVER_ParameterType, key,
 *   value (a word; a text or bytes for STRING and BYTES)
 * An empty correlation text means the number. Memory of inputs must stay until the event RELEASED.
 *
 * Returns CONCH_OK or the code of Execute's error, with which all requests end and no events come. Events that
 * arise while it runs, or have arisen before for other requests of this instance, are written to `out`;
 * `*written` is the number of words. If that is more than `out_words`, nothing was written, and `conch_left`
 * gives the events. `times` gets the batch's compute start and end in ns (0: not reported). */
CONCH_API int32_t conch_execute(
    conch_host* host, uint32_t index, uint32_t count, const uint64_t* words, uint64_t* out, uint64_t out_words,
    uint64_t* written, uint64_t times[2]);

/* Writes the events of the last batch that did not fit; returns the words, as above. */
CONCH_API uint64_t conch_left(conch_host* host, uint32_t index, uint64_t* out, uint64_t out_words);

/* Sets what IsCancelled of a request and of its factories says; nothing for an unknown number. */
CONCH_API void conch_cancel(conch_host* host, uint64_t number);

/* --- Events ------------------------------------------------------------------------------------------------ */

/* Each event is: words of it (this one included), kind, number of its request or 0, then by kind. */
enum conch_event {
  /* A response: final (0 or 1), code or ~0, result, then of an error: its text; else:
   *   count of parameters, each as above
   *   count of outputs, each: index or ~0, TRITONSERVER_DataType, rank, dims..., address, size,
   *   TRITONSERVER_MemoryType, device, and, if the index is ~0, its name
   * Memory stays until `conch_free_result`. A final without a response is final = 2, and nothing follows. */
  CONCH_RESPONSE = 1,
  /* The backend has done with the request: its inputs are free. */
  CONCH_RELEASED = 2,
  /* As RELEASED; the request runs again. */
  CONCH_RESCHEDULED = 3,
  /* A state for the request's sequence: result, then as an output. */
  CONCH_STATE = 4,
  /* A text for the log: TRITONSERVER_LogLevel, line, file, text. */
  CONCH_LOG = 5,
  /* Something that the backend does against the config or the interface: text. */
  CONCH_NOTE = 6,
  /* A named time of a trace: ns, name. */
  CONCH_ACTIVITY = 7,
  /* A metric's change: operation (conch_metric), family's kind, value (double's bits), family's name, help,
   * count of labels, each: name, value; for a histogram: count of bounds, bounds (double's bits). */
  CONCH_METRIC = 8,
  /* A call that waits for `conch_answer`: call, operation (conch_query), version (int64), model's name, text, count
   * of parameters, each as above: those of a load, of types STRING and BYTES. */
  CONCH_QUERY = 9,
  /* A request to another model: call, model's name, version (int64), flags, correlation id, priority, timeout in
   * us, id, correlation text, trace context, count of parameters, each as above, count of inputs, each: TRITONSERVER_DataType, rank, dims..., name, address,
   * size; count of requested outputs, names. `conch_call_taken` once the inputs were copied. */
  CONCH_CALL = 10,
  /* The backend cancels a call: call. */
  CONCH_CALL_CANCEL = 11,
  /* A response that holds no memory, without an error or parameters: final (0 or 1), words of the description
   * that follows, count of outputs, for each: index, TRITONSERVER_DataType, rank, dims..., size; then the bytes
   * of each, padded to words. */
  CONCH_SMALL_RESPONSE = 12,
};

enum conch_metric { CONCH_METRIC_INCREMENT, CONCH_METRIC_SET, CONCH_METRIC_OBSERVE, CONCH_METRIC_DELETE, CONCH_METRIC_NEW };

enum conch_query {
  CONCH_MODEL_READY, CONCH_SERVER_READY, CONCH_SERVER_METADATA, CONCH_MODEL_METADATA, CONCH_MODEL_STATISTICS,
  CONCH_MODEL_CONFIG, CONCH_MODEL_INDEX, CONCH_LOAD, CONCH_UNLOAD, CONCH_UNLOAD_DEPENDENTS,
  CONCH_MODEL_PROPERTIES, CONCH_SERVER_LIVE, CONCH_SERVER_METRICS,
};

/* Waits up to `timeout_ms` for events that no `conch_execute` returns, and writes whole ones to `out`. Returns
 * the number of words; 0 on a timeout and after `conch_wake`. If it is more than `out_words`, nothing was written,
 * and the first event needs so much room. While 64 MiB of events wait here, threads of the backend wait in calls
 * that make more: the thread that calls this may not wait for them. One thread at a time, always the same. */
CONCH_API uint64_t conch_wait(conch_host* host, uint64_t* out, uint64_t out_words, uint32_t timeout_ms);
CONCH_API void conch_wake(conch_host* host);

/* Frees what a response or a state holds. */
CONCH_API void conch_free_result(conch_result* result);

/* The levels that `LogIsEnabled` answers with true: bit N for TRITONSERVER_LogLevel N. */
CONCH_API void conch_set_log_levels(uint32_t levels);

/* --- Answers ----------------------------------------------------------------------------------------------- */

/* Ends a query: `code` is CONCH_OK and `text` the answer, or an error. READY and LIVE are answered by 0 or 1,
 * PROPERTIES by a number: bit 0 says that the model is decoupled, bit 1 that it batches; METRICS by Prometheus' text;
 * what asks for a message by its JSON. */
CONCH_API void conch_answer(conch_host* host, uint64_t call, int32_t code, const char* text);

/* The server has the inputs of a call: its release callback runs. */
CONCH_API void conch_call_taken(conch_host* host, uint64_t call);

/* A response to a call: words
 *   flags (TRITONSERVER_ResponseCompleteFlag), code or ~0, has a response (0 or 1), model's name, version, id,
 *   of an error: its text, else: count of parameters, each as above; count of outputs, each:
 *   TRITONSERVER_DataType, rank, dims..., name, address, size
 * The host copies what it keeps. Ends the call if it is final. */
CONCH_API void conch_reply(conch_host* host, uint64_t call, const uint64_t* words);

/* --- Repository agents; one process serves one library, on one thread -------------------------------------- */

typedef struct conch_agent conch_agent;
typedef struct conch_agent_model conch_agent_model;

/* Opens an agent's library and calls its Initialize. On an error `*agent` is NULL. */
CONCH_API int32_t conch_open_agent(conch_agent** agent, const char* library);
CONCH_API int32_t conch_close_agent(conch_agent* agent);

/* Begins one load of a model: ModelInitialize. `config` is the config as written in JSON, or NULL; the `count`
 * parameters are the agent's. The model is made also on an error, and must be closed. */
CONCH_API int32_t conch_open_agent_model(
    conch_agent* agent, conch_agent_model** model, const char* location, const char* config, uint32_t count,
    const char* const* keys, const char* const* values);
/* Runs a TRITONREPOAGENT_ActionType. `*location` is where the model is then, valid until the next call. */
CONCH_API int32_t conch_run_agent(
    conch_agent* agent, conch_agent_model* model, int32_t action, const char** location);
CONCH_API int32_t conch_close_agent_model(conch_agent* agent, conch_agent_model* model);

#endif
