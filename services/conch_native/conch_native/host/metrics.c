/* Custom metrics. Values live here; changes become events, at most one that waits for each metric, except for
 * observations, each of which is an event. */
#include <stdlib.h>

#include "internal.h"

struct TRITONSERVER_MetricFamily {
  conch_host* host;
  TRITONSERVER_MetricKind kind;
  char* name;
  char* help;
  struct TRITONSERVER_Metric* metrics;
};

struct TRITONSERVER_MetricArgs {
  double* bounds;
  uint64_t count;
};

typedef struct label {
  char *name, *value;
} label_t;

/* The value of all metrics with the same family and labels. */
struct TRITONSERVER_Metric {
  TRITONSERVER_MetricFamily* family; /* NULL once the family was deleted */
  conch_host* host;
  TRITONSERVER_MetricKind kind;
  char *name, *help;
  label_t* labels;
  uint64_t label_count;
  double* bounds;
  uint64_t bound_count;
  int references;
  double value, added; /* `added` was not told yet */
  bool set, queued, deleted;
  TRITONSERVER_Metric* next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all metrics */

TRITONSERVER_Error* TRITONSERVER_MetricFamilyNew(
    TRITONSERVER_MetricFamily** family, TRITONSERVER_MetricKind kind, const char* name, const char* description) {
  *family = NULL;
  if ((unsigned)kind > TRITONSERVER_METRIC_KIND_HISTOGRAM)
    return conch_error(TRITONSERVER_ERROR_INVALID_ARG, "metric family '%s' has no known kind", name);
  *family = conch_alloc(sizeof **family);
  (*family)->host = atomic_load(&conch_current);
  (*family)->kind = kind;
  (*family)->name = conch_copy(name);
  (*family)->help = conch_copy(description == NULL ? "" : description);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_MetricFamilyDelete(TRITONSERVER_MetricFamily* family) {
  pthread_mutex_lock(&lock);
  bool used = family->metrics != NULL;
  pthread_mutex_unlock(&lock);
  if (used)
    return conch_error(
        TRITONSERVER_ERROR_INTERNAL,
        "Must call MetricDelete on all dependent metrics before calling MetricFamilyDelete.");
  free(family->name);
  free(family->help);
  free(family);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_GetMetricFamilyKind(TRITONSERVER_MetricFamily* family, TRITONSERVER_MetricKind* kind) {
  *kind = family->kind;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_MetricArgsNew(TRITONSERVER_MetricArgs** args) {
  *args = conch_alloc(sizeof **args);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_MetricArgsSetHistogram(
    TRITONSERVER_MetricArgs* args, const double* buckets, uint64_t buckets_count) {
  free(args->bounds);
  args->bounds = conch_alloc(buckets_count * sizeof *buckets);
  if (buckets_count) memcpy(args->bounds, buckets, buckets_count * sizeof *buckets);
  args->count = buckets_count;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_MetricArgsDelete(TRITONSERVER_MetricArgs* args) {
  free(args->bounds);
  free(args);
  return NO_ERROR;
}

/* --- Events ------------------------------------------------------------------------------------------------ */

static event_t* change(const TRITONSERVER_Metric* metric, enum conch_metric operation, double value) {
  event_t* event = event_new(CONCH_METRIC, 0);
  words_t* body = &event->body;
  words_put(body, operation);
  words_put(body, metric->kind);
  words_put_real(body, value);
  words_put_text(body, metric->name);
  words_put_text(body, metric->help);
  words_put(body, metric->label_count);
  for (uint64_t i = 0; i < metric->label_count; i++) {
    words_put_text(body, metric->labels[i].name);
    words_put_text(body, metric->labels[i].value);
  }
  if (metric->kind == TRITONSERVER_METRIC_KIND_HISTOGRAM) {
    words_put(body, metric->bound_count);
    for (uint64_t i = 0; i < metric->bound_count; i++) words_put_real(body, metric->bounds[i]);
  }
  return event;
}

static void metric_free(TRITONSERVER_Metric* metric) {
  for (uint64_t i = 0; i < metric->label_count; i++) {
    free(metric->labels[i].name);
    free(metric->labels[i].value);
  }
  free(metric->labels);
  free(metric->bounds);
  free(metric->name);
  free(metric->help);
  free(metric);
}

event_t* metric_take(TRITONSERVER_Metric* metric) {
  pthread_mutex_lock(&lock);
  event_t* event = metric->set ? change(metric, CONCH_METRIC_SET, metric->value)
                               : change(metric, CONCH_METRIC_INCREMENT, metric->added);
  metric->set = metric->queued = false;
  metric->added = 0;
  bool last = metric->deleted;
  pthread_mutex_unlock(&lock);
  if (last) metric_free(metric);
  return event;
}

/* Has the metric's change told; needs the lock. */
static void tell(TRITONSERVER_Metric* metric) {
  if (metric->queued) return;
  metric->queued = true;
  event_t* event = event_new(CONCH_METRIC, 0);
  event->metric = metric;
  event_post(metric->host, event);
}

/* --- Metrics ----------------------------------------------------------------------------------------------- */

static bool same_labels(const TRITONSERVER_Metric* metric, const TRITONSERVER_Parameter** labels, uint64_t count) {
  if (metric->label_count != count) return false;
  for (uint64_t i = 0; i < count; i++) {
    uint64_t j = 0;
    while (j < count && (strcmp(metric->labels[j].name, labels[i]->name) != 0 ||
                         strcmp(metric->labels[j].value, labels[i]->value.text) != 0))
      j++;
    if (j == count) return false;
  }
  return true;
}

TRITONSERVER_Error* TRITONSERVER_MetricNewWithArgs(
    TRITONSERVER_Metric** metric, TRITONSERVER_MetricFamily* family, const TRITONSERVER_Parameter** labels,
    uint64_t label_count, const TRITONSERVER_MetricArgs* args) {
  *metric = NULL;
  if (family->kind == TRITONSERVER_METRIC_KIND_HISTOGRAM && (args == NULL || args->count == 0))
    return conch_error(TRITONSERVER_ERROR_INVALID_ARG, "Bucket boundaries not found in Metric args.");
  for (uint64_t i = 0; i < label_count; i++) {
    if (labels[i]->type != TRITONSERVER_PARAMETER_STRING)
      return conch_error(
          TRITONSERVER_ERROR_INVALID_ARG,
          "Parameter [%llu] must have a type of TRITONSERVER_PARAMETER_STRING to be added as a label.",
          (unsigned long long)i);
  }
  event_wait_for_room(family->host);
  pthread_mutex_lock(&lock);
  TRITONSERVER_Metric* found = family->metrics;
  while (found != NULL && !same_labels(found, labels, label_count)) found = found->next;
  if (found == NULL) {
    found = conch_alloc(sizeof *found);
    found->family = family;
    found->host = family->host;
    found->kind = family->kind;
    found->name = conch_copy(family->name);
    found->help = conch_copy(family->help);
    found->labels = conch_alloc(label_count * sizeof *found->labels);
    found->label_count = label_count;
    for (uint64_t i = 0; i < label_count; i++) {
      found->labels[i].name = conch_copy(labels[i]->name);
      found->labels[i].value = conch_copy(labels[i]->value.text);
    }
    if (args != NULL && args->count) {
      found->bounds = (double*)conch_copy_bytes(args->bounds, args->count * sizeof *args->bounds);
      found->bound_count = args->count;
    }
    found->next = family->metrics;
    family->metrics = found;
    event_post(found->host, change(found, CONCH_METRIC_NEW, 0));
  }
  found->references++;
  pthread_mutex_unlock(&lock);
  *metric = found;
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_MetricNew(
    TRITONSERVER_Metric** metric, TRITONSERVER_MetricFamily* family, const TRITONSERVER_Parameter** labels,
    uint64_t label_count) {
  return TRITONSERVER_MetricNewWithArgs(metric, family, labels, label_count, NULL);
}

TRITONSERVER_Error* TRITONSERVER_MetricDelete(TRITONSERVER_Metric* metric) {
  pthread_mutex_lock(&lock);
  bool last = --metric->references == 0;
  bool queued = metric->queued;
  if (last) {
    TRITONSERVER_Metric** place = &metric->family->metrics;
    while (*place != metric) place = &(*place)->next;
    *place = metric->next;
    metric->deleted = true;
    event_post(metric->host, change(metric, CONCH_METRIC_DELETE, 0));
  }
  pthread_mutex_unlock(&lock);
  if (last && !queued) metric_free(metric);
  return NO_ERROR;
}

static TRITONSERVER_Error* wrong_kind(TRITONSERVER_MetricKind kind, const char* operation) {
  static const char* const names[] = {"COUNTER", "GAUGE", "HISTOGRAM"};
  return conch_error(
      TRITONSERVER_ERROR_UNSUPPORTED, "TRITONSERVER_METRIC_KIND_%s does not support %s", names[kind], operation);
}

TRITONSERVER_Error* TRITONSERVER_MetricValue(TRITONSERVER_Metric* metric, double* value) {
  if (metric->kind == TRITONSERVER_METRIC_KIND_HISTOGRAM) return wrong_kind(metric->kind, "Value");
  pthread_mutex_lock(&lock);
  *value = metric->value;
  pthread_mutex_unlock(&lock);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_MetricIncrement(TRITONSERVER_Metric* metric, double value) {
  if (metric->kind == TRITONSERVER_METRIC_KIND_HISTOGRAM) return wrong_kind(metric->kind, "Increment");
  if (metric->kind == TRITONSERVER_METRIC_KIND_COUNTER && !(value >= 0))
    return conch_error(
        TRITONSERVER_ERROR_INVALID_ARG,
        "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values.");
  pthread_mutex_lock(&lock);
  metric->value += value;
  metric->added += value;
  tell(metric);
  pthread_mutex_unlock(&lock);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_MetricSet(TRITONSERVER_Metric* metric, double value) {
  if (metric->kind != TRITONSERVER_METRIC_KIND_GAUGE) return wrong_kind(metric->kind, "Set");
  pthread_mutex_lock(&lock);
  metric->value = value;
  metric->set = true;
  tell(metric);
  pthread_mutex_unlock(&lock);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_MetricObserve(TRITONSERVER_Metric* metric, double value) {
  if (metric->kind != TRITONSERVER_METRIC_KIND_HISTOGRAM) return wrong_kind(metric->kind, "Observe");
  event_wait_for_room(metric->host);
  pthread_mutex_lock(&lock);
  event_post(metric->host, change(metric, CONCH_METRIC_OBSERVE, value));
  pthread_mutex_unlock(&lock);
  return NO_ERROR;
}

TRITONSERVER_Error* TRITONSERVER_GetMetricKind(TRITONSERVER_Metric* metric, TRITONSERVER_MetricKind* kind) {
  *kind = metric->kind;
  return NO_ERROR;
}
