/* Errors, messages, names, parameters, buffer attributes, words. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "internal.h"
#include "triton/core/tritoncache.h"
#include "triton/core/tritonrepoagent.h"

#define MOST_TEXT 65536

struct TRITONSERVER_Error {
  TRITONSERVER_Error_Code code;
  char text[];
};

static _Thread_local char last_text[8192];

void* conch_alloc(size_t size) {
  void* memory = calloc(1, size ? size : 1);
  if (memory == NULL) {
    fputs("conch: no memory is left for a compiled backend\n", stderr);
    abort();
  }
  return memory;
}

void* conch_realloc(void* memory, size_t size) {
  void* moved = realloc(memory, size ? size : 1);
  if (moved == NULL) {
    fputs("conch: no memory is left for a compiled backend\n", stderr);
    abort();
  }
  return moved;
}

char* conch_copy_bytes(const void* bytes, size_t size) {
  char* copy = conch_alloc(size + 1);
  if (size) memcpy(copy, bytes, size);
  return copy;
}

char* conch_copy(const char* text) { return text == NULL ? NULL : conch_copy_bytes(text, strlen(text)); }

/* --- Errors ------------------------------------------------------------------------------------------------ */

TRITONSERVER_Error* TRITONSERVER_ErrorNew(TRITONSERVER_Error_Code code, const char* msg) {
  if (msg == NULL) msg = "";
  TRITONSERVER_Error* error = conch_alloc(sizeof *error + strlen(msg) + 1);
  error->code = code;
  strcpy(error->text, msg);
  return error;
}

TRITONSERVER_Error* conch_error(TRITONSERVER_Error_Code code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int size = vsnprintf(NULL, 0, format, arguments);
  va_end(arguments);
  TRITONSERVER_Error* error = conch_alloc(sizeof *error + (size_t)size + 1);
  error->code = code;
  va_start(arguments, format);
  vsnprintf(error->text, (size_t)size + 1, format, arguments);
  va_end(arguments);
  return error;
}

TRITONSERVER_Error* conch_unsupported(const char* function) {
  return conch_error(TRITONSERVER_ERROR_UNSUPPORTED, "conch does not provide %s", function);
}

int32_t conch_take_error(TRITONSERVER_Error* error) {
  if (error == NULL) return CONCH_OK;
  int32_t code = (int32_t)error->code;
  snprintf(last_text, sizeof last_text, "%s", error->text);
  free(error);
  return code;
}

int32_t conch_fail(int32_t code, const char* text) {
  return conch_take_error(TRITONSERVER_ErrorNew((TRITONSERVER_Error_Code)code, text));
}

const char* conch_error_text(void) { return last_text; }

void TRITONSERVER_ErrorDelete(TRITONSERVER_Error* error) { free(error); }

TRITONSERVER_Error_Code TRITONSERVER_ErrorCode(TRITONSERVER_Error* error) { return error->code; }

const char* TRITONSERVER_ErrorMessage(TRITONSERVER_Error* error) { return error->text; }

const char* TRITONSERVER_ErrorCodeString(TRITONSERVER_Error* error) {
  static const char* const names[] = {"Unknown",     "Internal",    "Not found",      "Invalid argument",
                                      "Unavailable", "Unsupported", "Already exists", "Cancelled"};
  return (unsigned)error->code < 8 ? names[error->code] : "<invalid code>";
}

/* --- Messages ---------------------------------------------------------------------------------------------- */

TRITONSERVER_Message* conch_message(const char* text) {
  TRITONSERVER_Message* message = conch_alloc(sizeof *message);
  conch_set_message(message, text);
  return message;
}

void conch_set_message(TRITONSERVER_Message* message, const char* text) {
  free(message->text);
  message->text = conch_copy(text);
  message->size = strlen(text);
}

TRITONSERVER_Error* TRITONSERVER_MessageNewFromSerializedJson(
    TRITONSERVER_Message** message, const char* base, size_t size) {
  *message = conch_alloc(sizeof **message);
  (*message)->text = conch_copy_bytes(base, size);
  (*message)->size = size;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_MessageDelete(TRITONSERVER_Message* message) {
  if (message != NULL) free(message->text);
  free(message);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_MessageSerializeToJson(
    TRITONSERVER_Message* message, const char** base, size_t* size) {
  *base = message->text;
  *size = message->size;
  return NO_ERROR;
}

/* --- Versions and names ------------------------------------------------------------------------------------ */

TRITONSERVER_Error* TRITONSERVER_ApiVersion(uint32_t* major, uint32_t* minor) {
  *major = TRITONSERVER_API_VERSION_MAJOR;
  *minor = TRITONSERVER_API_VERSION_MINOR;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONBACKEND_ApiVersion(uint32_t* major, uint32_t* minor) {
  *major = TRITONBACKEND_API_VERSION_MAJOR;
  *minor = TRITONBACKEND_API_VERSION_MINOR;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONREPOAGENT_ApiVersion(uint32_t* major, uint32_t* minor) {
  *major = TRITONREPOAGENT_API_VERSION_MAJOR;
  *minor = TRITONREPOAGENT_API_VERSION_MINOR;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONCACHE_ApiVersion(uint32_t* major, uint32_t* minor) {
  *major = TRITONCACHE_API_VERSION_MAJOR;
  *minor = TRITONCACHE_API_VERSION_MINOR;
  return NO_ERROR;
}

static const struct {
  const char* name;
  uint32_t size;
} datatypes[] = {{"<invalid>", 0}, {"BOOL", 1},  {"UINT8", 1}, {"UINT16", 2}, {"UINT32", 4},
                 {"UINT64", 8},    {"INT8", 1},  {"INT16", 2}, {"INT32", 4},  {"INT64", 8},
                 {"FP16", 2},      {"FP32", 4},  {"FP64", 8},  {"BYTES", 0},  {"BF16", 2}};
#define DATATYPES (sizeof datatypes / sizeof *datatypes)

const char* TRITONSERVER_DataTypeString(TRITONSERVER_DataType datatype) {
  return (size_t)datatype < DATATYPES ? datatypes[datatype].name : "<invalid>";
}

uint32_t TRITONSERVER_DataTypeByteSize(TRITONSERVER_DataType datatype) {
  return (size_t)datatype < DATATYPES ? datatypes[datatype].size : 0;
}

TRITONSERVER_DataType TRITONSERVER_StringToDataType(const char* dtype) {
  for (size_t i = 1; i < DATATYPES; i++)
    if (strcmp(datatypes[i].name, dtype) == 0) return (TRITONSERVER_DataType)i;
  return TRITONSERVER_TYPE_INVALID;
}

const char* TRITONSERVER_MemoryTypeString(TRITONSERVER_MemoryType memory_type) {
  static const char* const names[] = {"CPU", "CPU_PINNED", "GPU"};
  return (unsigned)memory_type < 3 ? names[memory_type] : "<invalid>";
}

const char* TRITONSERVER_ParameterTypeString(TRITONSERVER_ParameterType type) {
  static const char* const names[] = {"STRING", "INT", "BOOL", "DOUBLE", "BYTES"};
  return (unsigned)type < 5 ? names[type] : "<invalid>";
}

const char* TRITONSERVER_InstanceGroupKindString(TRITONSERVER_InstanceGroupKind kind) {
  static const char* const names[] = {"AUTO", "CPU", "GPU", "MODEL"};
  return (unsigned)kind < 4 ? names[kind] : "<invalid>";
}

/* --- Buffer attributes ------------------------------------------------------------------------------------- */

TRITONSERVER_Error* TRITONSERVER_BufferAttributesNew(TRITONSERVER_BufferAttributes** attributes) {
  *attributes = conch_alloc(sizeof **attributes);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_BufferAttributesDelete(TRITONSERVER_BufferAttributes* attributes) {
  free(attributes);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_BufferAttributesSetMemoryTypeId(
    TRITONSERVER_BufferAttributes* attributes, int64_t id) {
  attributes->id = id;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_BufferAttributesSetMemoryType(
    TRITONSERVER_BufferAttributes* attributes, TRITONSERVER_MemoryType memory_type) {
  attributes->type = memory_type;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_BufferAttributesSetCudaIpcHandle(
    TRITONSERVER_BufferAttributes* attributes, void* cuda_ipc_handle) {
  attributes->ipc_handle = cuda_ipc_handle;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_BufferAttributesSetByteSize(
    TRITONSERVER_BufferAttributes* attributes, size_t size) {
  attributes->size = size;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_BufferAttributesMemoryTypeId(
    TRITONSERVER_BufferAttributes* attributes, int64_t* id) {
  *id = attributes->id;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_BufferAttributesMemoryType(
    TRITONSERVER_BufferAttributes* attributes, TRITONSERVER_MemoryType* memory_type) {
  *memory_type = attributes->type;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_BufferAttributesCudaIpcHandle(
    TRITONSERVER_BufferAttributes* attributes, void** cuda_ipc_handle) {
  *cuda_ipc_handle = attributes->ipc_handle;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_BufferAttributesByteSize(
    TRITONSERVER_BufferAttributes* attributes, size_t* size) {
  *size = attributes->size;
  return NO_ERROR;
}

/* --- Parameters -------------------------------------------------------------------------------------------- */

TRITONSERVER_Parameter* TRITONSERVER_ParameterNew(
    const char* name, TRITONSERVER_ParameterType type, const void* value) {
  if (type == TRITONSERVER_PARAMETER_BYTES || value == NULL) return NULL;
  TRITONSERVER_Parameter* parameter = conch_alloc(sizeof *parameter);
  parameter->name = conch_copy(name);
  parameter->type = type;
  switch (type) {
    case TRITONSERVER_PARAMETER_STRING:
      parameter->value.text = conch_copy(value);
      break;
    case TRITONSERVER_PARAMETER_INT:
      parameter->value.number = *(const int64_t*)value;
      break;
    case TRITONSERVER_PARAMETER_BOOL:
      parameter->value.truth = *(const bool*)value;
      break;
    default:
      parameter->value.real = *(const double*)value;
  }
  return parameter;
}

TRITONSERVER_Parameter* TRITONSERVER_ParameterBytesNew(const char* name, const void* byte_ptr, uint64_t size) {
  TRITONSERVER_Parameter* parameter = conch_alloc(sizeof *parameter);
  parameter->name = conch_copy(name);
  parameter->type = TRITONSERVER_PARAMETER_BYTES;
  parameter->value.bytes = byte_ptr;
  parameter->size = size;
  return parameter;
}

void TRITONSERVER_ParameterDelete(TRITONSERVER_Parameter* parameter) {
  if (parameter == NULL) return;
  if (parameter->type == TRITONSERVER_PARAMETER_STRING) free(parameter->value.text);
  free(parameter->name);
  free(parameter);
}

const void* conch_parameter_value(const TRITONSERVER_Parameter* parameter) {
  if (parameter->type == TRITONSERVER_PARAMETER_STRING) return parameter->value.text;
  if (parameter->type == TRITONSERVER_PARAMETER_BYTES) return parameter->value.bytes;
  return &parameter->value;
}

void conch_free_parameters(TRITONSERVER_Parameter* first) {
  while (first != NULL) {
    TRITONSERVER_Parameter* next = first->next;
    TRITONSERVER_ParameterDelete(first);
    first = next;
  }
}

TRITONSERVER_Parameter* conch_parameter_at(TRITONSERVER_Parameter* first, uint32_t index) {
  while (first != NULL && index-- > 0) first = first->next;
  return first;
}

uint32_t conch_parameter_count(const TRITONSERVER_Parameter* first) {
  uint32_t count = 0;
  for (; first != NULL; first = first->next) count++;
  return count;
}

/* --- Words ------------------------------------------------------------------------------------------------- */

static void words_reserve(words_t* to, size_t more) {
  if (to->count + more <= to->room) return;
  to->room = (to->count + more) * 2 < 32 ? 32 : (to->count + more) * 2;
  to->words = conch_realloc(to->words, to->room * sizeof(uint64_t));
}

void words_put(words_t* to, uint64_t word) {
  words_reserve(to, 1);
  to->words[to->count++] = word;
}

void words_put_real(words_t* to, double value) {
  uint64_t word;
  memcpy(&word, &value, sizeof word);
  words_put(to, word);
}

void words_put_bytes(words_t* to, const void* bytes, size_t size) {
  words_put(to, size);
  words_put_padded(to, bytes, size);
}

void words_put_padded(words_t* to, const void* bytes, size_t size) {
  size_t padded = (size + 7) / 8;
  if (padded == 0) return;
  words_reserve(to, padded);
  to->words[to->count + padded - 1] = 0;
  memcpy(to->words + to->count, bytes, size);
  to->count += padded;
}

/* Cuts long texts between characters. */
void words_put_text(words_t* to, const char* text) {
  size_t size = text == NULL ? 0 : strlen(text);
  if (size > MOST_TEXT) {
    size = MOST_TEXT;
    while (size > 0 && ((unsigned char)text[size] & 0xC0) == 0x80) size--;
  }
  words_put_bytes(to, text, size);
}

void words_put_dims(words_t* to, const int64_t* dims, uint32_t rank) {
  words_reserve(to, rank + 1);
  to->words[to->count++] = rank;
  for (uint32_t i = 0; i < rank; i++) to->words[to->count++] = (uint64_t)dims[i];
}

void words_put_parameters(words_t* to, const TRITONSERVER_Parameter* first) {
  words_put(to, conch_parameter_count(first));
  for (; first != NULL; first = first->next) {
    words_put(to, first->type);
    words_put_text(to, first->name);
    switch (first->type) {
      case TRITONSERVER_PARAMETER_STRING:
        words_put_bytes(to, first->value.text, strlen(first->value.text));
        break;
      case TRITONSERVER_PARAMETER_BYTES:
        words_put_bytes(to, first->value.bytes, first->size);
        break;
      case TRITONSERVER_PARAMETER_DOUBLE:
        words_put_real(to, first->value.real);
        break;
      case TRITONSERVER_PARAMETER_BOOL:
        words_put(to, first->value.truth);
        break;
      default:
        words_put(to, (uint64_t)first->value.number);
    }
  }
}

const char* words_text(const uint64_t** at, uint64_t* size) {
  *size = *(*at)++;
  const char* text = (const char*)*at;
  *at += (*size + 7) / 8;
  return text;
}

TRITONSERVER_Parameter* words_parameters(const uint64_t** at) {
  TRITONSERVER_Parameter *first = NULL, **last = &first;
  for (uint64_t count = *(*at)++; count > 0; count--) {
    TRITONSERVER_Parameter* parameter = conch_alloc(sizeof *parameter);
    parameter->type = (TRITONSERVER_ParameterType) * (*at)++;
    uint64_t size;
    const char* key = words_text(at, &size);
    parameter->name = conch_copy_bytes(key, size);
    if (parameter->type == TRITONSERVER_PARAMETER_STRING || parameter->type == TRITONSERVER_PARAMETER_BYTES) {
      const char* text = words_text(at, &size);
      parameter->type = TRITONSERVER_PARAMETER_STRING;
      parameter->value.text = conch_copy_bytes(text, size);
    } else {
      uint64_t word = *(*at)++;
      if (parameter->type == TRITONSERVER_PARAMETER_BOOL)
        parameter->value.truth = word != 0;
      else
        memcpy(&parameter->value, &word, sizeof word);
    }
    *last = parameter;
    last = &parameter->next;
  }
  return first;
}
