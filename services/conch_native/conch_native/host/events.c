/* Events from the backend to conch's worker.
 *
 * While a batch runs, the events of its requests are collected, and `conch_execute` returns them. All others, and
 * those of decoupled models, whose order must not depend on two threads, wait for `conch_wait`. That a request
 * runs again belongs to the outcome of its batch, and so do the states of decoupled models.
 *
 * What waits for `conch_wait` is bounded: a thread of the backend that adds to it waits while it has MOST_QUEUED
 * bytes. Threads of the worker never wait, as one of them may be the one that is waited for.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "internal.h"

#define MOST_QUEUED ((size_t)64 << 20)

_Atomic uint32_t conch_log_levels = 7; /* INFO, WARN, ERROR */
_Thread_local int conch_in_worker;
conch_host* _Atomic conch_current;

void conch_set_log_levels(uint32_t levels) { atomic_store(&conch_log_levels, levels); }

event_t* event_new(enum conch_event kind, uint64_t number) {
  event_t* event = conch_alloc(sizeof *event);
  words_put(&event->body, 0);
  words_put(&event->body, kind);
  words_put(&event->body, number);
  return event;
}

static void event_free(event_t* event) {
  free(event->body.words);
  free(event);
}

void event_append(event_list_t* list, event_t* event) {
  event->next = NULL;
  if (list->last == NULL)
    list->first = event;
  else
    list->last->next = event;
  list->last = event;
}

void event_free_all(event_list_t* list) {
  while (list->first != NULL) {
    event_t* next = list->first->next;
    const uint64_t* words = list->first->body.words;
    uint64_t result = words[1] == CONCH_RESPONSE ? words[RESPONSE_RESULT] : words[1] == CONCH_STATE ? words[STATE_RESULT] : 0;
    conch_free_result((conch_result*)(uintptr_t)result);
    event_free(list->first);
    list->first = next;
  }
  list->last = NULL;
}

static size_t cost_of(const event_t* event) {
  return sizeof *event + event->body.room * sizeof *event->body.words + event->held;
}

void event_append_all(event_list_t* list, event_list_t events) {
  if (events.first == NULL) return;
  if (list->last == NULL)
    list->first = events.first;
  else
    list->last->next = events.first;
  list->last = events.last;
}

void event_post_all(conch_host* host, event_list_t events) {
  if (events.first == NULL) return;
  size_t cost = 0;
  for (event_t* each = events.first; each != NULL; each = each->next) cost += each->cost = cost_of(each);
  pthread_mutex_lock(&host->lock);
  event_append_all(&host->events, events);
  host->queued += cost;
  bool wake = host->waiting;
  pthread_mutex_unlock(&host->lock);
  if (wake) pthread_cond_signal(&host->arrived);
}

void event_wait_for_room(conch_host* host) {
  if (conch_in_worker) return;
  pthread_mutex_lock(&host->lock);
  while (host->served && host->queued >= MOST_QUEUED) pthread_cond_wait(&host->room, &host->lock);
  pthread_mutex_unlock(&host->lock);
}

void event_post(conch_host* host, event_t* event) {
  event->next = NULL;
  event_post_all(host, (event_list_t){event, event});
}

void event_post_of(const life_t* life, event_list_t events, bool ordered) {
  TRITONBACKEND_ModelInstance* instance = life->instance;
  if (!ordered) {
    pthread_mutex_lock(&instance->lock);
    bool running = instance->executing && instance->batch == life->batch;
    if (running) event_append_all(&instance->events, events);
    pthread_mutex_unlock(&instance->lock);
    if (running) return;
  }
  event_post_all(life->host, events);
}

void event_note(conch_host* host, uint64_t number, const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  event_t* event = event_new(CONCH_NOTE, number);
  words_put_text(&event->body, text);
  event_post(host, event);
}

uint64_t event_take(event_list_t* list, uint64_t* out, uint64_t room, size_t* cost) {
  uint64_t written = 0;
  while (list->first != NULL) {
    event_t* event = list->first;
    if (event->metric != NULL) {
      event_t* change = metric_take(event->metric);
      change->next = event->next;
      change->cost = event->cost;
      if (list->last == event) list->last = change;
      list->first = change;
      event_free(event);
      event = change;
    }
    uint64_t size = event->body.count;
    if (size > room - written) return written > 0 ? written : size;
    event->body.words[0] = size;
    memcpy(out + written, event->body.words, size * sizeof *out);
    written += size;
    *cost += event->cost;
    list->first = event->next;
    if (list->first == NULL) list->last = NULL;
    event_free(event);
  }
  return written;
}

uint64_t conch_wait(conch_host* host, uint64_t* out, uint64_t out_words, uint32_t timeout_ms) {
  struct timespec end;
  clock_gettime(CLOCK_MONOTONIC, &end);
  end.tv_sec += timeout_ms / 1000;
  end.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
  if (end.tv_nsec >= 1000000000) {
    end.tv_nsec -= 1000000000;
    end.tv_sec++;
  }
  conch_in_worker = 1; /* for all that this thread does */
  event_list_t taken = {NULL, NULL};
  size_t cost = 0;
  pthread_mutex_lock(&host->lock);
  host->waiting = host->served = true;
  while (host->events.first == NULL && !host->woken)
    if (pthread_cond_timedwait(&host->arrived, &host->lock, &end) == ETIMEDOUT) break;
  host->waiting = false;
  host->woken = false;
  taken = host->events;
  host->events = (event_list_t){NULL, NULL};
  pthread_mutex_unlock(&host->lock);
  uint64_t written = event_take(&taken, out, out_words, &cost);
  pthread_mutex_lock(&host->lock);
  if (taken.first != NULL) { /* what did not fit stays in front */
    taken.last->next = host->events.first;
    if (host->events.last == NULL) host->events.last = taken.last;
    host->events.first = taken.first;
  }
  host->queued -= cost;
  bool room = cost > 0 && host->queued < MOST_QUEUED;
  pthread_mutex_unlock(&host->lock);
  if (room) pthread_cond_broadcast(&host->room);
  return written;
}

void conch_wake(conch_host* host) {
  pthread_mutex_lock(&host->lock);
  host->woken = true;
  pthread_mutex_unlock(&host->lock);
  pthread_cond_signal(&host->arrived);
}

/* --- Log --------------------------------------------------------------------------------------------------- */

bool TRITONSERVER_LogIsEnabled(TRITONSERVER_LogLevel level) {
  return (unsigned)level < 4 && (atomic_load(&conch_log_levels) >> level & 1) != 0;
}

TRITONSERVER_Error* TRITONSERVER_LogMessage(
    TRITONSERVER_LogLevel level, const char* filename, int line, const char* msg) {
  if ((unsigned)level > 3)
    return conch_error(TRITONSERVER_ERROR_INVALID_ARG, "unknown logging level '%d'", (int)level);
  conch_host* host = atomic_load(&conch_current);
  if (host == NULL || !TRITONSERVER_LogIsEnabled(level)) return NO_ERROR;
  event_wait_for_room(host);
  const char* slash = filename == NULL ? NULL : strrchr(filename, '/');
  event_t* event = event_new(CONCH_LOG, 0);
  words_put(&event->body, level);
  words_put(&event->body, (uint64_t)line);
  words_put_text(&event->body, slash == NULL ? filename : slash + 1);
  words_put_text(&event->body, msg);
  event_post(host, event);
  return NO_ERROR;
}
