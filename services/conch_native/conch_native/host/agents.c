/* Repository agents: libraries that run when a model is loaded and unloaded. One process serves one library. */
#include <dlfcn.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "internal.h"
#include "triton/core/tritonrepoagent.h"

typedef TRITONSERVER_Error* (*agent_entry_t)(TRITONREPOAGENT_Agent*);
typedef TRITONSERVER_Error* (*model_entry_t)(TRITONREPOAGENT_Agent*, TRITONREPOAGENT_AgentModel*);
typedef TRITONSERVER_Error* (*action_t)(
    TRITONREPOAGENT_Agent*, TRITONREPOAGENT_AgentModel*, const TRITONREPOAGENT_ActionType);

struct TRITONREPOAGENT_Agent {
  void* library;
  void* state;
  agent_entry_t initialize, finalize;
  model_entry_t model_initialize, model_finalize;
  action_t action;
};

struct TRITONREPOAGENT_AgentModel {
  char* location; /* where the model is, as this agent leaves it */
  char* acquired; /* a temporary directory, or NULL */
  char* config;   /* or NULL */
  TRITONSERVER_Parameter* parameters;
  TRITONREPOAGENT_ActionType current;
  void* state;
};

/* --- Called by conch --------------------------------------------------------------------------------------- */

int32_t conch_open_agent(conch_agent** result, const char* library) {
  *result = NULL;
  void* opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (opened == NULL)
    return conch_take_error(
        conch_error(TRITONSERVER_ERROR_NOT_FOUND, "unable to load shared library: %s", dlerror()));
  TRITONREPOAGENT_Agent* agent = conch_alloc(sizeof *agent);
  agent->library = opened;
  agent->action = (action_t)dlsym(opened, "TRITONREPOAGENT_ModelAction");
  if (agent->action == NULL)
    return conch_take_error(conch_error(
        TRITONSERVER_ERROR_NOT_FOUND,
        "unable to find required entrypoint 'TRITONREPOAGENT_ModelAction' in shared library: %s", library));
  agent->initialize = (agent_entry_t)dlsym(opened, "TRITONREPOAGENT_Initialize");
  agent->finalize = (agent_entry_t)dlsym(opened, "TRITONREPOAGENT_Finalize");
  agent->model_initialize = (model_entry_t)dlsym(opened, "TRITONREPOAGENT_ModelInitialize");
  agent->model_finalize = (model_entry_t)dlsym(opened, "TRITONREPOAGENT_ModelFinalize");
  TRITONSERVER_Error* error = agent->initialize == NULL ? NO_ERROR : agent->initialize(agent);
  if (error == NULL) *result = (conch_agent*)agent;
  return conch_take_error(error);
}

int32_t conch_close_agent(conch_agent* opened) {
  TRITONREPOAGENT_Agent* agent = (TRITONREPOAGENT_Agent*)opened;
  return conch_take_error(agent->finalize == NULL ? NO_ERROR : agent->finalize(agent));
}

int32_t conch_open_agent_model(
    conch_agent* opened, conch_agent_model** result, const char* location, const char* config, uint32_t count,
    const char* const* keys, const char* const* values) {
  TRITONREPOAGENT_Agent* agent = (TRITONREPOAGENT_Agent*)opened;
  TRITONREPOAGENT_AgentModel* model = conch_alloc(sizeof *model);
  *result = (conch_agent_model*)model;
  model->location = conch_copy(location);
  model->config = conch_copy(config);
  TRITONSERVER_Parameter** last = &model->parameters;
  for (uint32_t i = 0; i < count; i++) {
    *last = TRITONSERVER_ParameterNew(keys[i], TRITONSERVER_PARAMETER_STRING, values[i]);
    last = &(*last)->next;
  }
  return conch_take_error(agent->model_initialize == NULL ? NO_ERROR : agent->model_initialize(agent, model));
}

int32_t conch_run_agent(conch_agent* opened, conch_agent_model* on, int32_t action, const char** location) {
  TRITONREPOAGENT_Agent* agent = (TRITONREPOAGENT_Agent*)opened;
  TRITONREPOAGENT_AgentModel* model = (TRITONREPOAGENT_AgentModel*)on;
  model->current = (TRITONREPOAGENT_ActionType)action;
  TRITONSERVER_Error* error = agent->action(agent, model, model->current);
  *location = model->location;
  return conch_take_error(error);
}

static int remove_entry(const char* path, const struct stat* status, int flag, struct FTW* place) {
  (void)status;
  (void)flag;
  (void)place;
  return remove(path);
}

static void remove_acquired(TRITONREPOAGENT_AgentModel* model) {
  if (model->acquired == NULL) return;
  nftw(model->acquired, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
  free(model->acquired);
  model->acquired = NULL;
}

int32_t conch_close_agent_model(conch_agent* opened, conch_agent_model* on) {
  TRITONREPOAGENT_Agent* agent = (TRITONREPOAGENT_Agent*)opened;
  TRITONREPOAGENT_AgentModel* model = (TRITONREPOAGENT_AgentModel*)on;
  TRITONSERVER_Error* error = agent->model_finalize == NULL ? NO_ERROR : agent->model_finalize(agent, model);
  remove_acquired(model);
  conch_free_parameters(model->parameters);
  free(model->location);
  free(model->config);
  free(model);
  return conch_take_error(error);
}

/* --- Called by agents -------------------------------------------------------------------------------------- */

TRITONSERVER_Error* TRITONREPOAGENT_ModelRepositoryLocation(
    TRITONREPOAGENT_Agent* agent, TRITONREPOAGENT_AgentModel* model, TRITONREPOAGENT_ArtifactType* type,
    const char** location) {
  (void)agent;
  *type = TRITONREPOAGENT_ARTIFACT_FILESYSTEM;
  *location = model->location;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONREPOAGENT_ModelRepositoryLocationAcquire(
    TRITONREPOAGENT_Agent* agent, TRITONREPOAGENT_AgentModel* model,
    const TRITONREPOAGENT_ArtifactType artifact_type, const char** location) {
  (void)agent;
  if (artifact_type != TRITONREPOAGENT_ARTIFACT_FILESYSTEM)
    return conch_error(TRITONSERVER_ERROR_UNSUPPORTED, "conch gives agents directories on the file system only");
  if (model->acquired == NULL) {
    const char* parent = getenv("TMPDIR");
    char path[4096];
    snprintf(path, sizeof path, "%s/conch-agent-XXXXXX", parent == NULL || *parent == 0 ? "/tmp" : parent);
    if (mkdtemp(path) == NULL)
      return conch_error(TRITONSERVER_ERROR_INTERNAL, "a temporary directory '%s' can't be made", path);
    model->acquired = conch_copy(path);
  }
  *location = model->acquired;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONREPOAGENT_ModelRepositoryLocationRelease(
    TRITONREPOAGENT_Agent* agent, TRITONREPOAGENT_AgentModel* model, const char* location) {
  (void)agent;
  if (model->acquired == NULL || strcmp(model->acquired, location) != 0)
    return conch_error(TRITONSERVER_ERROR_UNAVAILABLE, "No mutable location to be deleted");
  remove_acquired(model);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONREPOAGENT_ModelRepositoryUpdate(
    TRITONREPOAGENT_Agent* agent, TRITONREPOAGENT_AgentModel* model,
    const TRITONREPOAGENT_ArtifactType artifact_type, const char* location) {
  static const char* const names[] = {"LOAD", "LOAD_COMPLETE", "LOAD_FAIL", "UNLOAD", "UNLOAD_COMPLETE"};
  (void)agent;
  if (model->current != TRITONREPOAGENT_ACTION_LOAD)
    return conch_error(
        TRITONSERVER_ERROR_INVALID_ARG,
        "location can only be updated during TRITONREPOAGENT_ACTION_LOAD, current action type is "
        "TRITONREPOAGENT_ACTION_%s",
        names[model->current]);
  if (artifact_type != TRITONREPOAGENT_ARTIFACT_FILESYSTEM)
    return conch_error(TRITONSERVER_ERROR_UNSUPPORTED, "conch loads models from the file system only");
  char* copy = conch_copy(location);
  free(model->location);
  model->location = copy;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONREPOAGENT_ModelParameterCount(
    TRITONREPOAGENT_Agent* agent, TRITONREPOAGENT_AgentModel* model, uint32_t* count) {
  (void)agent;
  *count = conch_parameter_count(model->parameters);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONREPOAGENT_ModelParameter(
    TRITONREPOAGENT_Agent* agent, TRITONREPOAGENT_AgentModel* model, const uint32_t index,
    const char** parameter_name, const char** parameter_value) {
  (void)agent;
  const TRITONSERVER_Parameter* parameter = conch_parameter_at(model->parameters, index);
  if (parameter == NULL)
    return conch_error(
        TRITONSERVER_ERROR_INVALID_ARG, "index out of range for model parameters: %u of %u", index,
        conch_parameter_count(model->parameters));
  *parameter_name = parameter->name;
  *parameter_value = parameter->value.text;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONREPOAGENT_ModelConfig(
    TRITONREPOAGENT_Agent* agent, TRITONREPOAGENT_AgentModel* model, const uint32_t config_version,
    TRITONSERVER_Message** model_config) {
  (void)agent;
  if (config_version != 1)
    return conch_error(
        TRITONSERVER_ERROR_INVALID_ARG, "model configuration version %u not supported, supported versions are: 1",
        config_version);
  *model_config = model->config == NULL ? NULL : conch_message(model->config);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONREPOAGENT_ModelState(TRITONREPOAGENT_AgentModel* model, void** state) {
  *state = model->state;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONREPOAGENT_ModelSetState(TRITONREPOAGENT_AgentModel* model, void* state) {
  model->state = state;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONREPOAGENT_State(TRITONREPOAGENT_Agent* agent, void** state) {
  *state = agent->state;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONREPOAGENT_SetState(TRITONREPOAGENT_Agent* agent, void* state) {
  agent->state = state;
  return NO_ERROR;
}
