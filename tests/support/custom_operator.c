/* A library of custom operators for ONNX Runtime: "Foo" of domain "tests", with one FP32 input and output.
   It can be registered and placed in a graph, not run. ONNX Runtime's headers are in none of its packages. */
#include <stddef.h>
#include <stdint.h>

typedef struct Operator Operator;
typedef int OfTensor(const Operator *, size_t);

struct Operator { /* OrtCustomOp as of version 1; ONNX Runtime calls `characteristics` in all versions */
  uint32_t version;
  const void *(*create)(const Operator *, const void *, const void *);
  const char *(*name)(const Operator *);
  const char *(*provider)(const Operator *);
  OfTensor *input_type;
  size_t (*inputs)(const Operator *);
  OfTensor *output_type;
  size_t (*outputs)(const Operator *);
  void (*compute)(void *, void *);
  void (*destroy)(void *);
  OfTensor *characteristics[2];
  void *later[20];
};

struct ApiBase { /* OrtApiBase */
  void *const *(*functions)(uint32_t);
  const char *(*version)(void);
};

enum { CREATE_DOMAIN = 26, ADD_TO_DOMAIN = 27, ADD_DOMAIN = 28 }; /* places in OrtApi */

static const void *create(const Operator *op, const void *api, const void *info) {
  (void)api, (void)info;
  return op;
}
static const char *name(const Operator *op) { return (void)op, "Foo"; }
static const char *provider(const Operator *op) { return (void)op, NULL; }
static int type(const Operator *op, size_t index) { return (void)op, (void)index, 1; }
static int required(const Operator *op, size_t index) { return (void)op, (void)index, 0; }
static size_t one(const Operator *op) { return (void)op, 1; }
static void destroy(void *kernel) { (void)kernel; }

static const Operator foo = {
    1, create, name, provider, type, one, type, one, NULL, destroy, {required, required}, {NULL}};

void *RegisterCustomOps(void *options, const struct ApiBase *base) {
  void *const *functions = base->functions(1);
  void *domain;
  void *status = ((void *(*)(const char *, void **))functions[CREATE_DOMAIN])("tests", &domain);
  if (status == NULL) status = ((void *(*)(void *, const void *))functions[ADD_TO_DOMAIN])(domain, &foo);
  if (status == NULL) status = ((void *(*)(void *, void *))functions[ADD_DOMAIN])(options, domain);
  return status;
}
