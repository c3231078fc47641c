/* Runs random batches on several instances of chaos.c, and checks that each request ends once.
 *
 * random_driver LIBRARY SEED BATCHES DECOUPLED
 */
#include <stdio.h>
#include <stdlib.h>

#include "internal.h"

#define INSTANCES 3
#define MOST 8
#define NUMBERS (1u << 20)

static conch_host* host;
static conch_layout* layout;
static atomic_uchar finals[NUMBERS], releases[NUMBERS];
static atomic_uint next_number, errors;
static atomic_bool over;
static unsigned batches;
static int decoupled;

static void fail(const char* text, uint64_t number) {
  fprintf(stderr, "request %llu: %s\n", (unsigned long long)number, text);
  atomic_fetch_add(&errors, 1);
}

static void read_events(const uint64_t* at, uint64_t words) {
  const uint64_t* end = at + words;
  for (; at < end; at += at[0]) {
    uint64_t number = at[2];
    switch (at[1]) {
      case CONCH_RESPONSE:
        if (at[3] && atomic_fetch_add(&finals[number], 1)) fail("a second final response", number);
        if (!at[3] && atomic_load(&finals[number])) fail("a response behind the final one", number);
        if (at[4] == NO_CODE && at[3] != 2) {
          const uint64_t* inner = at + 6;
          conch_free_parameters(words_parameters(&inner));
          uint64_t count = *inner++;
          if (count != 1 || inner[0] != 0 || inner[2] != 2 || inner[6] != 8) fail("an odd response", number);
        }
        conch_free_result((conch_result*)(uintptr_t)at[RESPONSE_RESULT]);
        break;
      case CONCH_SMALL_RESPONSE:
        if (at[3] && atomic_fetch_add(&finals[number], 1)) fail("a second final response", number);
        if (!at[3] && atomic_load(&finals[number])) fail("a response behind the final one", number);
        if (at[4] != 7 || at[5] != 1 || at[6] != 0 || at[8] != 2 || at[11] != 8 || at[0] != 13)
          fail("an odd small response", number);
        break;
      case CONCH_STATE:
        conch_free_result((conch_result*)(uintptr_t)at[STATE_RESULT]);
        break;
      case CONCH_RELEASED:
      case CONCH_RESCHEDULED:
        if (atomic_fetch_add(&releases[number], 1)) fail("released twice", number);
        break;
    }
  }
}

static void* wait_for_events(void* unused) {
  static uint64_t out[4096];
  (void)unused;
  for (;;) {
    bool last = atomic_load(&over);
    uint64_t words = conch_wait(host, out, 4096, last ? 0 : 50);
    read_events(out, words);
    if (last && words == 0) return NULL;
  }
}

static void* run(void* given) {
  uint32_t index = (uint32_t)(uintptr_t)given;
  unsigned seed = index * 7919 + (unsigned)batches;
  static _Thread_local uint64_t out[512];
  static unsigned char inputs[INSTANCES][1 << 16];
  unsigned place = 0;
  for (unsigned i = 0; i < batches; i++) {
    uint64_t words[MOST * 32];
    unsigned at = 0, count = 1 + (unsigned)rand_r(&seed) % MOST;
    unsigned first = atomic_fetch_add(&next_number, count);
    for (unsigned j = 0; j < count; j++) {
      /* Inputs must stay until the release: each place is used again long after. */
      unsigned char* input = &inputs[index][place = (place + 3) % ((1 << 16) - 3)];
      input[0] = (unsigned char)(rand_r(&seed) % 64);
      if (input[0] % 12 == 10 && rand_r(&seed) % 8) input[0]++;
      input[1] = rand_r(&seed) % 2 ? 0 : (unsigned char)rand_r(&seed);
      input[2] = (unsigned char)rand_r(&seed);
      bool rare = rand_r(&seed) % 2;
      uint64_t head[] = {first + j, (uint64_t)(uintptr_t)layout, 0, 0, j, 0, 0, rare ? 6 : 0};
      memcpy(words + at, head, sizeof head);
      at += 8;
      if (rare) {
        uint64_t rarities[] = {2, 0, 0, 2, 0, 0};
        memcpy(&rarities[1], "id", 2);
        memcpy(&rarities[4], "{}", 2);
        memcpy(words + at, rarities, sizeof rarities);
        at += 6;
      }
      words[at++] = (uint64_t)(uintptr_t)input;
      words[at++] = 3;
    }
    if (rand_r(&seed) % 4 == 0) conch_cancel(host, first);
    uint64_t written, times[2];
    int32_t code = conch_execute(host, index, count, words, out, 512, &written, times);
    if (code != CONCH_OK) {
      for (unsigned j = 0; j < count; j++) {
        atomic_fetch_add(&finals[first + j], 1);
        atomic_fetch_add(&releases[first + j], 1);
      }
      if (written || strcmp(conch_error_text(), "the batch fails") != 0) fail("an odd error of Execute", first);
      continue;
    }
    if (written <= 512) {
      read_events(out, written);
      continue;
    }
    uint64_t* more = conch_alloc(written * sizeof *more);
    if (conch_left(host, index, more, written) != written) fail("other events than those that did not fit", first);
    read_events(more, written);
    free(more);
  }
  return NULL;
}

int main(int count, char** arguments) {
  if (count != 5) return 2;
  batches = (unsigned)atoi(arguments[3]);
  decoupled = atoi(arguments[4]);
  next_number = (unsigned)atoi(arguments[2]) % 97;
  unsigned first = next_number;
  if (conch_open(&host, arguments[1], "/", "chaos", "{}") != CONCH_OK) return puts(conch_error_text()), 1;
  if (conch_open_model(host, "m", 1, "/", "{}", false, decoupled, decoupled, NULL) != CONCH_OK) return 1;
  const char* outputs[] = {"OUT", "STATE_OUT"};
  conch_set_outputs(host, 2, outputs, 1);
  uint64_t description[] = {1, TRITONSERVER_TYPE_UINT8, 2, 1, 3, 2, 0, 0};
  memcpy(&description[6], "IN", 2);
  layout = conch_new_layout(description);
  pthread_t threads[INSTANCES], waiter;
  for (uint32_t i = 0; i < INSTANCES; i++)
    if (conch_open_instance(host, i, "m_0", 1, 0, false, "{}", 0, NULL) != CONCH_OK) return 1;
  pthread_create(&waiter, NULL, wait_for_events, NULL);
  for (uintptr_t i = 0; i < INSTANCES; i++) pthread_create(&threads[i], NULL, run, (void*)i);
  for (int i = 0; i < INSTANCES; i++) pthread_join(threads[i], NULL);
  conch_close(host);
  atomic_store(&over, true);
  conch_wake(host);
  pthread_join(waiter, NULL);
  conch_free_layout(layout);
  for (unsigned i = first; i < next_number; i++) {
    if (finals[i] != 1) fail("no final response", i);
    if (releases[i] != 1) fail("not released", i);
  }
  if (host->life_count) fail("requests are left", host->life_count);
  printf("%u requests, %u errors\n", next_number - first, errors);
  return errors ? 1 : 0;
}
