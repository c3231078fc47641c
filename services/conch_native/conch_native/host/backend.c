/* The backend, its model and instances: opening and closing, and what they say of themselves. */
#include <dlfcn.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>

#include "internal.h"

uint32_t conch_interface(void) { return CONCH_INTERFACE; }

/* --- Opening ----------------------------------------------------------------------------------------------- */

static void* symbol(conch_host* host, const char* name) {
  char full[96];
  snprintf(full, sizeof full, "TRITONBACKEND_%s", name);
  void* found = dlsym(host->library, full);
  Dl_info info;
  /* A library linked against this one finds our own functions, too; these nine we do not have. */
  return found != NULL && dladdr(found, &info) != 0 ? found : NULL;
}

static void write_facts(conch_host* host) {
  const TRITONBACKEND_BackendAttribute* attributes = &host->backend.attributes;
  char* text = NULL;
  size_t size = 0;
  FILE* to = open_memstream(&text, &size);
  if (to == NULL) abort();
  fputs("{\"preferred_groups\":[", to);
  for (size_t i = 0; i < attributes->group_count; i++) {
    const preferred_t* group = &attributes->groups[i];
    fprintf(
        to, "%s{\"kind\":\"KIND_%s\",\"count\":%llu,\"gpus\":[", i ? "," : "",
        TRITONSERVER_InstanceGroupKindString(group->kind), (unsigned long long)group->count);
    for (uint64_t j = 0; j < group->id_count; j++)
      fprintf(to, "%s%llu", j ? "," : "", (unsigned long long)group->ids[j]);
    fputs("]}", to);
  }
  fprintf(
      to, "],\"parallel_instances\":%s,\"device_blocking\":%s,\"ready\":%s}", attributes->parallel ? "true" : "false",
      host->backend.policy == TRITONBACKEND_EXECUTION_DEVICE_BLOCKING ? "true" : "false",
      host->ready != NULL ? "true" : "false");
  fclose(to);
  host->facts = text;
}

/* Outputs of some megabytes come from memory that stays, without page faults for each. */
static void keep_large_blocks(void) {
#ifdef __GLIBC__
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
#endif
}

int32_t conch_open(
    conch_host** result, const char* library, const char* directory, const char* name, const char* config) {
  *result = NULL;
  void* opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (opened == NULL)
    return conch_take_error(
        conch_error(TRITONSERVER_ERROR_NOT_FOUND, "unable to load shared library: %s", dlerror()));
  keep_large_blocks();
  conch_host* host = conch_alloc(sizeof *host);
  host->library = opened;
  host->server.host = host->backend.host = host->model.host = host;
  pthread_mutex_init(&host->lock, NULL);
  pthread_cond_init(&host->room, NULL);
  pthread_mutex_init(&host->instances_lock, NULL);
  pthread_mutex_init(&host->lives_lock, NULL);
  pthread_mutex_init(&host->calls_lock, NULL);
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&host->arrived, &monotonic);
  pthread_condattr_destroy(&monotonic);
  host->backend.name = conch_copy(name);
  host->backend.directory = conch_copy(directory);
  host->backend.config = conch_message(config);
  host->execute = (execute_t)symbol(host, "ModelInstanceExecute");
  if (host->execute == NULL)
    return conch_take_error(conch_error(
        TRITONSERVER_ERROR_NOT_FOUND,
        "unable to find required entrypoint 'TRITONBACKEND_ModelInstanceExecute' in shared library: %s", library));
  host->initialize = (entry_t)symbol(host, "Initialize");
  host->finalize = (entry_t)symbol(host, "Finalize");
  host->model_initialize = (entry_t)symbol(host, "ModelInitialize");
  host->model_finalize = (entry_t)symbol(host, "ModelFinalize");
  host->instance_initialize = (entry_t)symbol(host, "ModelInstanceInitialize");
  host->instance_finalize = (entry_t)symbol(host, "ModelInstanceFinalize");
  host->ready = (entry_t)symbol(host, "ModelInstanceReady");
  host->get_attribute = (entry2_t)symbol(host, "GetBackendAttribute");
  atomic_store(&conch_current, host);
  if (host->initialize != NULL) {
    TRITONSERVER_Error* error = host->initialize(&host->backend);
    if (error != NULL) return conch_take_error(error);
  }
  if (host->get_attribute != NULL) {
    TRITONSERVER_Error* error = host->get_attribute(&host->backend, &host->backend.attributes);
    if (error != NULL) {
      event_note(
          host, 0, "backend '%s' can't say its attributes: %s", name, TRITONSERVER_ErrorMessage(error));
      TRITONSERVER_ErrorDelete(error);
    }
  }
  write_facts(host);
  *result = host;
  return CONCH_OK;
}

const char* conch_facts(conch_host* host) { return host->facts; }

int32_t conch_open_model(
    conch_host* host, const char* name, uint64_t version, const char* directory, const char* config, bool complete,
    bool decoupled, bool iterative, conch_on_config on_config) {
  TRITONBACKEND_Model* model = &host->model;
  model->name = conch_copy(name);
  model->directory = conch_copy(directory);
  model->version = version;
  model->config = conch_message(config);
  model->complete = complete;
  model->decoupled = decoupled;
  model->iterative = iterative;
  model->on_config = on_config;
  model->initializing = true;
  TRITONSERVER_Error* error = host->model_initialize == NULL ? NO_ERROR : host->model_initialize(model);
  model->initializing = false;
  return conch_take_error(error);
}

int32_t conch_set_config(conch_host* host, const char* config) {
  conch_set_message(host->model.config, config);
  return CONCH_OK;
}

void conch_set_outputs(conch_host* host, uint32_t count, const char* const* names, uint32_t states) {
  TRITONBACKEND_Model* model = &host->model;
  model->outputs = conch_alloc(count * sizeof *model->outputs);
  for (uint32_t i = 0; i < count; i++) model->outputs[i] = conch_copy(names[i]);
  model->output_count = count - states;
  model->state_count = states;
}

int32_t conch_open_instance(
    conch_host* host, uint32_t index, const char* name, int32_t kind, int32_t device, bool passive,
    const char* policy, uint32_t profile_count, const char* const* profiles) {
  TRITONBACKEND_ModelInstance* instance = conch_alloc(sizeof *instance);
  instance->host = host;
  instance->name = conch_copy(name);
  instance->kind = (TRITONSERVER_InstanceGroupKind)kind;
  instance->device = device;
  instance->passive = passive;
  instance->policy = conch_message(policy);
  instance->profile_count = profile_count;
  instance->profiles = conch_alloc(profile_count * sizeof *instance->profiles);
  for (uint32_t i = 0; i < profile_count; i++) instance->profiles[i] = conch_copy(profiles[i]);
  pthread_mutex_init(&instance->lock, NULL);
  if (host->instance_initialize != NULL) {
    TRITONSERVER_Error* error = host->instance_initialize(instance);
    if (error != NULL) return conch_take_error(error);
  }
  pthread_mutex_lock(&host->instances_lock);
  if (index >= host->instance_count) {
    host->instances = conch_realloc(host->instances, (index + 1) * sizeof *host->instances);
    while (host->instance_count <= index) host->instances[host->instance_count++] = NULL;
  }
  host->instances[index] = instance;
  pthread_mutex_unlock(&host->instances_lock);
  return CONCH_OK;
}

int32_t conch_ready(conch_host* host, uint32_t index) {
  if (host->ready == NULL) return CONCH_OK;
  return conch_take_error(host->ready(host->instances[index]));
}

static void finalize(const char* what, entry_t entry, void* object) {
  if (entry == NULL) return;
  TRITONSERVER_Error* error = entry(object);
  if (error == NULL) return;
  TRITONSERVER_LogMessage(TRITONSERVER_LOG_ERROR, what, 0, TRITONSERVER_ErrorMessage(error));
  TRITONSERVER_ErrorDelete(error);
}

void conch_close(conch_host* host) {
  for (uint32_t i = 0; i < host->instance_count; i++)
    finalize("TRITONBACKEND_ModelInstanceFinalize", host->instance_finalize, host->instances[i]);
  finalize("TRITONBACKEND_ModelFinalize", host->model_finalize, &host->model);
  finalize("TRITONBACKEND_Finalize", host->finalize, &host->backend);
}

/* --- Backend ----------------------------------------------------------------------------------------------- */

TRITONSERVER_Error* TRITONBACKEND_BackendName(TRITONBACKEND_Backend* backend, const char** name) {
  *name = backend->name;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_BackendConfig(TRITONBACKEND_Backend* backend, TRITONSERVER_Message** message) {
  *message = backend->config;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_BackendExecutionPolicy(
    TRITONBACKEND_Backend* backend, TRITONBACKEND_ExecutionPolicy* policy) {
  *policy = backend->policy;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_BackendSetExecutionPolicy(
    TRITONBACKEND_Backend* backend, TRITONBACKEND_ExecutionPolicy policy) {
  backend->policy = policy;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_BackendArtifacts(
    TRITONBACKEND_Backend* backend, TRITONBACKEND_ArtifactType* type, const char** location) {
  *type = TRITONBACKEND_ARTIFACT_FILESYSTEM;
  *location = backend->directory;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_BackendMemoryManager(
    TRITONBACKEND_Backend* backend, TRITONBACKEND_MemoryManager** manager) {
  *manager = &backend->manager;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_BackendState(TRITONBACKEND_Backend* backend, void** state) {
  *state = backend->state;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_BackendSetState(TRITONBACKEND_Backend* backend, void* state) {
  backend->state = state;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup(
    TRITONBACKEND_BackendAttribute* attributes, TRITONSERVER_InstanceGroupKind kind, uint64_t count,
    const uint64_t* device_ids, uint64_t id_count) {
  attributes->groups =
      conch_realloc(attributes->groups, (attributes->group_count + 1) * sizeof *attributes->groups);
  preferred_t* group = &attributes->groups[attributes->group_count++];
  group->kind = kind;
  group->count = count;
  group->id_count = id_count;
  group->ids = conch_alloc(id_count * sizeof *group->ids);
  if (id_count) memcpy(group->ids, device_ids, id_count * sizeof *group->ids);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_BackendAttributeSetParallelModelInstanceLoading(
    TRITONBACKEND_BackendAttribute* attributes, bool enabled) {
  attributes->parallel = enabled;
  return NO_ERROR;
}

/* --- Memory ------------------------------------------------------------------------------------------------ */

TRITONSERVER_Error* TRITONBACKEND_MemoryManagerAllocate(
    TRITONBACKEND_MemoryManager* manager, void** buffer, TRITONSERVER_MemoryType memory_type, int64_t id,
    uint64_t size) {
  (void)manager;
  if (memory_type != TRITONSERVER_MEMORY_CPU) return conch_allocate_device(buffer, memory_type, id, size);
  *buffer = malloc(size ? size : 1);
  if (*buffer == NULL) return conch_error(TRITONSERVER_ERROR_UNAVAILABLE, "CPU memory allocation failed");
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_MemoryManagerFree(
    TRITONBACKEND_MemoryManager* manager, void* buffer, TRITONSERVER_MemoryType memory_type, int64_t id) {
  (void)manager;
  if (memory_type != TRITONSERVER_MEMORY_CPU) return conch_free_device(buffer, memory_type, id);
  free(buffer);
  return NO_ERROR;
}

/* --- Model ------------------------------------------------------------------------------------------------- */

static TRITONSERVER_Error* check_version(uint32_t version) {
  if (version == 1) return NO_ERROR;
  return conch_error(
      TRITONSERVER_ERROR_INVALID_ARG, "model configuration version %u not supported, supported versions are: 1",
      version);
}

TRITONSERVER_Error* TRITONBACKEND_ModelName(TRITONBACKEND_Model* model, const char** name) {
  *name = model->name;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelVersion(TRITONBACKEND_Model* model, uint64_t* version) {
  *version = model->version;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelRepository(
    TRITONBACKEND_Model* model, TRITONBACKEND_ArtifactType* type, const char** location) {
  *type = TRITONBACKEND_ARTIFACT_FILESYSTEM;
  *location = model->directory;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelConfig(
    TRITONBACKEND_Model* model, uint32_t config_version, TRITONSERVER_Message** message) {
  TRITONSERVER_Error* error = check_version(config_version);
  if (error == NULL) *message = conch_message(model->config->text);
  return error;
}

TRITONSERVER_Error* TRITONBACKEND_ModelAutoCompleteConfig(TRITONBACKEND_Model* model, bool* auto_complete_config) {
  *auto_complete_config = model->complete;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelSetConfig(
    TRITONBACKEND_Model* model, uint32_t config_version, TRITONSERVER_Message* message) {
  TRITONSERVER_Error* error = check_version(config_version);
  if (error != NULL) return error;
  if (!model->initializing)
    return conch_error(
        TRITONSERVER_ERROR_UNSUPPORTED, "the config of model '%s' can be set only by TRITONBACKEND_ModelInitialize",
        model->name);
  if (model->on_config == NULL) return NO_ERROR;
  int32_t code = model->on_config(message->text);
  if (code == CONCH_OK) return NO_ERROR;
  return conch_error((TRITONSERVER_Error_Code)code, "%s", conch_error_text());
}

TRITONSERVER_Error* TRITONBACKEND_ModelServer(TRITONBACKEND_Model* model, TRITONSERVER_Server** server) {
  *server = &model->host->server;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelBackend(TRITONBACKEND_Model* model, TRITONBACKEND_Backend** backend) {
  *backend = &model->host->backend;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelState(TRITONBACKEND_Model* model, void** state) {
  *state = model->state;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelSetState(TRITONBACKEND_Model* model, void* state) {
  model->state = state;
  return NO_ERROR;
}

static void log_memory(const char* name, TRITONSERVER_BufferAttributes** usage, uint32_t usage_size) {
  for (uint32_t i = 0; i < usage_size; i++) {
    char text[512];
    snprintf(
        text, sizeof text, "'%s' uses %zu bytes of %s memory (device %lld)", name, usage[i]->size,
        TRITONSERVER_MemoryTypeString(usage[i]->type), (long long)usage[i]->id);
    TRITONSERVER_LogMessage(TRITONSERVER_LOG_INFO, "memory usage", 0, text);
  }
}

TRITONSERVER_Error* TRITONBACKEND_ModelReportMemoryUsage(
    TRITONBACKEND_Model* model, TRITONSERVER_BufferAttributes** attributes, uint32_t usage_size) {
  log_memory(model->name, attributes, usage_size);
  return NO_ERROR;
}

/* --- Instance ---------------------------------------------------------------------------------------------- */

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceName(TRITONBACKEND_ModelInstance* instance, const char** name) {
  *name = instance->name;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceKind(
    TRITONBACKEND_ModelInstance* instance, TRITONSERVER_InstanceGroupKind* kind) {
  *kind = instance->kind;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceDeviceId(TRITONBACKEND_ModelInstance* instance, int32_t* device_id) {
  *device_id = instance->device;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceHostPolicy(
    TRITONBACKEND_ModelInstance* instance, TRITONSERVER_Message** message) {
  *message = instance->policy;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceIsPassive(TRITONBACKEND_ModelInstance* instance, bool* is_passive) {
  *is_passive = instance->passive;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceProfileCount(TRITONBACKEND_ModelInstance* instance, uint32_t* count) {
  *count = instance->profile_count;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceProfileName(
    TRITONBACKEND_ModelInstance* instance, uint32_t index, const char** profile_name) {
  if (index >= instance->profile_count)
    return conch_error(
        TRITONSERVER_ERROR_INVALID_ARG, "out of bounds index %u: instance is configured with %u profiles", index,
        instance->profile_count);
  *profile_name = instance->profiles[index];
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceSecondaryDeviceCount(
    TRITONBACKEND_ModelInstance* instance, uint32_t* count) {
  (void)instance;
  *count = 0;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceSecondaryDeviceProperties(
    TRITONBACKEND_ModelInstance* instance, uint32_t index, const char** kind, int64_t* id) {
  (void)instance;
  (void)kind;
  (void)id;
  return conch_error(
      TRITONSERVER_ERROR_INVALID_ARG, "out of bounds index %u: instance is configured with 0 secondary devices",
      index);
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceModel(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Model** model) {
  *model = &instance->host->model;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceState(TRITONBACKEND_ModelInstance* instance, void** state) {
  *state = instance->state;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceSetState(TRITONBACKEND_ModelInstance* instance, void* state) {
  instance->state = state;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReportMemoryUsage(
    TRITONBACKEND_ModelInstance* instance, TRITONSERVER_BufferAttributes** attributes, uint32_t usage_size) {
  log_memory(instance->name, attributes, usage_size);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReportStatistics(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request* request, bool success, uint64_t exec_start_ns,
    uint64_t compute_start_ns, uint64_t compute_end_ns, uint64_t exec_end_ns) {
  (void)request;
  (void)exec_start_ns;
  (void)exec_end_ns;
  if (!success) return NO_ERROR; /* the error response counts */
  pthread_mutex_lock(&instance->lock);
  if (instance->compute_start == 0) {
    instance->compute_start = compute_start_ns;
    instance->compute_end = compute_end_ns;
  }
  pthread_mutex_unlock(&instance->lock);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReportBatchStatistics(
    TRITONBACKEND_ModelInstance* instance, uint64_t batch_size, uint64_t exec_start_ns, uint64_t compute_start_ns,
    uint64_t compute_end_ns, uint64_t exec_end_ns) {
  (void)batch_size;
  (void)exec_start_ns;
  (void)exec_end_ns;
  pthread_mutex_lock(&instance->lock);
  instance->compute_start = compute_start_ns;
  instance->compute_end = compute_end_ns;
  pthread_mutex_unlock(&instance->lock);
  return NO_ERROR;
}
