/* What a request, its factories and its responses share, and the table of them by number. */
#include <stdlib.h>

#include "internal.h"

/* Numbers count up in their upper bits, see the worker's protocol: a multiplication spreads them. */
static size_t slot_of(const conch_host* host, uint64_t number) {
  return (size_t)((number * 0x9E3779B97F4A7C15u) >> 32) & (host->life_slots - 1);
}

static void table_grow(conch_host* host) {
  size_t old_slots = host->life_slots;
  life_t** old = host->lives;
  host->life_slots = old_slots ? old_slots * 2 : 64;
  host->lives = conch_alloc(host->life_slots * sizeof *host->lives);
  for (size_t i = 0; i < old_slots; i++) {
    for (life_t* each = old[i]; each != NULL;) {
      life_t* next = each->next;
      size_t slot = slot_of(host, each->number);
      each->next = host->lives[slot];
      host->lives[slot] = each;
      each = next;
    }
  }
  free(old);
}

/* A request that runs again is found, and goes on. */
life_t* life_open(TRITONBACKEND_ModelInstance* instance, uint64_t number, const char* id) {
  conch_host* host = instance->host;
  pthread_mutex_lock(&host->lives_lock);
  if (host->life_slots == 0 || host->life_count > host->life_slots) table_grow(host);
  life_t** slot = &host->lives[slot_of(host, number)];
  life_t* life = *slot;
  while (life != NULL && life->number != number) life = life->next;
  if (life != NULL) {
    atomic_fetch_add(&life->references, 1);
    atomic_store(&life->released, false);
    life->instance = instance;
    life->batch = instance->batch;
    pthread_mutex_unlock(&host->lives_lock);
    return life;
  }
  life = conch_alloc(sizeof *life);
  atomic_init(&life->references, 1);
  life->host = host;
  life->instance = instance;
  life->batch = instance->batch;
  life->number = number;
  life->id = id == NULL ? NULL : conch_copy(id);
  pthread_mutex_init(&life->lock, NULL);
  life->next = *slot;
  *slot = life;
  host->life_count++;
  pthread_mutex_unlock(&host->lives_lock);
  return life;
}

life_t* life_hold(life_t* life) {
  atomic_fetch_add(&life->references, 1);
  return life;
}

void life_drop(life_t* life) {
  conch_host* host = life->host;
  pthread_mutex_lock(&host->lives_lock);
  if (atomic_fetch_sub(&life->references, 1) > 1) {
    pthread_mutex_unlock(&host->lives_lock);
    return;
  }
  life_t** place = &host->lives[slot_of(host, life->number)];
  while (*place != life) place = &(*place)->next;
  *place = life->next;
  host->life_count--;
  pthread_mutex_unlock(&host->lives_lock);
  event_free_all(&life->states);
  pthread_mutex_destroy(&life->lock);
  free(life->id);
  free(life);
}

void life_cancel(conch_host* host, uint64_t number) {
  pthread_mutex_lock(&host->lives_lock);
  if (host->life_slots) {
    life_t* life = host->lives[slot_of(host, number)];
    while (life != NULL && life->number != number) life = life->next;
    if (life != NULL) atomic_store(&life->cancelled, true);
  }
  pthread_mutex_unlock(&host->lives_lock);
}

void conch_cancel(conch_host* host, uint64_t number) { life_cancel(host, number); }

/* Posts an event behind the states; they stay together. Needs the lock. */
static void post(life_t* life, event_t* event, bool ordered) {
  event_append(&life->states, event);
  event_list_t events = life->states;
  life->states = (event_list_t){NULL, NULL};
  event_post_of(life, events, ordered);
}

void life_add_state(life_t* life, event_t* event) {
  pthread_mutex_lock(&life->lock);
  if (life->host->model.decoupled)
    event_post_of(life, (event_list_t){event, event}, false);
  else if (atomic_load(&life->final))
    post(life, event, false);
  else
    event_append(&life->states, event);
  pthread_mutex_unlock(&life->lock);
}

void life_release(life_t* life, bool again) {
  pthread_mutex_lock(&life->lock);
  event_t* event = event_new(again ? CONCH_RESCHEDULED : CONCH_RELEASED, life->number);
  post(life, event, life->host->model.decoupled && !again);
  pthread_mutex_unlock(&life->lock);
  if (again) return;
  atomic_store(&life->released, true);
  life_check(life);
}

void life_respond(life_t* life, event_t* event, bool final) {
  pthread_mutex_lock(&life->lock);
  if (final) atomic_store(&life->final, true);
  post(life, event, life->host->model.decoupled);
  pthread_mutex_unlock(&life->lock);
}

void life_check(life_t* life) {
  if (!atomic_load(&life->released) || atomic_load(&life->producers) > 0) return;
  if (atomic_load(&life->final) || atomic_exchange(&life->final, true)) return;
  const char* backend = life->host->backend.name;
  event_note(life->host, life->number, "backend '%s' releases requests without a final response", backend);
  event_t* event = event_new(CONCH_RESPONSE, life->number);
  words_put(&event->body, 1);
  words_put(&event->body, TRITONSERVER_ERROR_INTERNAL);
  words_put(&event->body, 0);
  TRITONSERVER_Error* error = conch_error(
      TRITONSERVER_ERROR_INTERNAL, "backend '%s' released the request without a final response", backend);
  words_put_text(&event->body, TRITONSERVER_ErrorMessage(error));
  TRITONSERVER_ErrorDelete(error);
  life_respond(life, event, true);
}
