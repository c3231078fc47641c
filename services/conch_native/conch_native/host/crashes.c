/* Reports of fatal signals: the C stack on standard error, then whoever handled the signal before. */
#include <execinfo.h>
#include <signal.h>
#include <unistd.h>

#include "internal.h"

#define MOST_FRAMES 64

static const int fatal[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
#define FATAL (sizeof fatal / sizeof *fatal)
static struct sigaction before[FATAL];

static void write_text(const char* text) {
  if (write(STDERR_FILENO, text, strlen(text)) < 0) return;
}

static void on_signal(int number) {
  void* frames[MOST_FRAMES];
  conch_host* host = atomic_load(&conch_current);
  write_text("conch: a fatal signal in backend '");
  write_text(host == NULL ? "?" : host->backend.name);
  write_text("', C stack, most recent call first:\n");
  backtrace_symbols_fd(frames, backtrace(frames, MOST_FRAMES), STDERR_FILENO);
  for (size_t i = 0; i < FATAL; i++)
    if (fatal[i] == number) sigaction(number, &before[i], NULL);
  raise(number);
}

void conch_report_crashes(void) {
  void* first[1];
  backtrace(first, 1); /* loads what it needs while memory can be allocated */
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = on_signal;
  action.sa_flags = SA_ONSTACK | SA_NODEFER;
  sigemptyset(&action.sa_mask);
  for (size_t i = 0; i < FATAL; i++) sigaction(fatal[i], &action, &before[i]);
}
