/* A repository agent that writes its calls to the file of its parameter "log".
 *
 * Parameter "do": "fail" refuses the load; "crash" ends the process; "move" loads the model from a copy.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "triton/core/tritonrepoagent.h"

static int models;

static const char* parameter(TRITONREPOAGENT_Agent* agent, TRITONREPOAGENT_AgentModel* model, const char* name) {
  uint32_t count;
  TRITONSERVER_ErrorDelete(TRITONREPOAGENT_ModelParameterCount(agent, model, &count));
  for (uint32_t i = 0; i < count; i++) {
    const char *key, *value;
    TRITONSERVER_ErrorDelete(TRITONREPOAGENT_ModelParameter(agent, model, i, &key, &value));
    if (strcmp(key, name) == 0) return value;
  }
  return "";
}

static void record(TRITONREPOAGENT_Agent* agent, TRITONREPOAGENT_AgentModel* model, const char* text) {
  FILE* file = fopen(parameter(agent, model, "log"), "a");
  if (file == NULL) return;
  fprintf(file, "%s %d\n", text, models);
  fclose(file);
}

TRITONSERVER_Error* TRITONREPOAGENT_ModelInitialize(TRITONREPOAGENT_Agent* agent, TRITONREPOAGENT_AgentModel* model) {
  models++;
  TRITONSERVER_Message* config;
  TRITONSERVER_Error* error = TRITONREPOAGENT_ModelConfig(agent, model, 1, &config);
  if (error != NULL) return error;
  const char* text;
  size_t size;
  TRITONSERVER_ErrorDelete(TRITONSERVER_MessageSerializeToJson(config, &text, &size));
  record(agent, model, strstr(text, "\"recorder\"") ? "initialize" : "no config");
  return TRITONSERVER_MessageDelete(config);
}

TRITONSERVER_Error* TRITONREPOAGENT_ModelFinalize(TRITONREPOAGENT_Agent* agent, TRITONREPOAGENT_AgentModel* model) {
  record(agent, model, "finalize");
  models--;
  return NULL;
}

TRITONSERVER_Error* TRITONREPOAGENT_ModelAction(
    TRITONREPOAGENT_Agent* agent, TRITONREPOAGENT_AgentModel* model, const TRITONREPOAGENT_ActionType action_type) {
  static const char* const names[] = {"load", "load complete", "load fail", "unload", "unload complete"};
  const char* what = parameter(agent, model, "do");
  record(agent, model, names[action_type]);
  if (action_type != TRITONREPOAGENT_ACTION_LOAD) {
    TRITONSERVER_Error* error =
        TRITONREPOAGENT_ModelRepositoryUpdate(agent, model, TRITONREPOAGENT_ARTIFACT_FILESYSTEM, "/");
    if (error == NULL) abort();
    TRITONSERVER_ErrorDelete(error);
    return NULL;
  }
  if (strcmp(what, "fail") == 0)
    return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INVALID_ARG, "the recorder refuses the model");
  if (strcmp(what, "crash") == 0) abort();
  if (strcmp(what, "move") != 0) return NULL;
  TRITONREPOAGENT_ArtifactType type;
  const char *from, *to;
  TRITONSERVER_Error* error = TRITONREPOAGENT_ModelRepositoryLocation(agent, model, &type, &from);
  if (error == NULL)
    error = TRITONREPOAGENT_ModelRepositoryLocationAcquire(agent, model, TRITONREPOAGENT_ARTIFACT_FILESYSTEM, &to);
  if (error != NULL) return error;
  char command[4096];
  snprintf(command, sizeof command, "cp -r '%s'/. '%s' && mv '%s/2' '%s/7'", from, to, to, to);
  if (system(command) != 0) return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INTERNAL, "the copy failed");
  return TRITONREPOAGENT_ModelRepositoryUpdate(agent, model, TRITONREPOAGENT_ARTIFACT_FILESYSTEM, to);
}
