/* Kernels: modules that the stand-in of cupy compiled for the host, and the check of each access that they make. */
#include "fake.h"

#include <dlfcn.h>

struct Function {
    void (*run)(unsigned grid, unsigned threads, const void *argument);
    size_t argument;
};

/* What the running kernel may touch without a question: its thread's stack, and the page that it touched last. */
static __thread int device;
static __thread Address stack_at, last_at;
static __thread size_t stack_size, last_size;

EXPORT Result cuModuleLoad(void **module, const char *path) {
    ENTER(INITIALISED | CONTEXT | NOT_CAPTURING);
    *module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    return *module ? OK : INVALID_IMAGE;
}

EXPORT Result cuModuleGetFunction(struct Function **function, void *module, const char *name) {
    ENTER(INITIALISED | CONTEXT);
    char symbol[128];
    snprintf(symbol, sizeof symbol, "fakecuda_run_%s", name);
    struct Function found = {.run = dlsym(module, symbol)};
    const size_t *bytes = dlsym(module, "fakecuda_argument_bytes");
    if (!found.run || !bytes) return NOT_FOUND;
    found.argument = *bytes;
    *function = memcpy(malloc(sizeof found), &found, sizeof found);
    return OK;
}

size_t argument_bytes(const struct Function *function) { return function->argument; }

void run_kernel(const struct Function *function, unsigned grid, unsigned threads, const void *argument, int on) {
    device = on;
    last_at = last_size = 0;
    if (!stack_at) {
        pthread_attr_t attributes;
        void *at;
        pthread_getattr_np(pthread_self(), &attributes);
        pthread_attr_getstack(&attributes, &at, &stack_size);
        pthread_attr_destroy(&attributes);
        stack_at = (Address)at;
    }
    function->run(grid, threads, argument);
}

/* g++ -fsanitize=kernel-address puts a call of these before each access. */
static void check(Address at, size_t size, const char *how) {
    if ((at >= last_at && at + size <= last_at + last_size) ||
        (at >= stack_at && at + size <= stack_at + stack_size))
        return;
    enum Place place = place_of(at, size, device);
    if (place != DEVICE_MEMORY && place != REGISTERED)
        DIE("a kernel %s memory that is neither its GPU's nor registered: address=%#lx bytes=%zu", how, at, size);
    Address page = at / 4096 * 4096; /* the rest of the page is of the same mapping, whose ends are ends of pages */
    if (at + size <= page + 4096) last_at = page, last_size = 4096;
}

#define CHECK(bytes) \
    EXPORT void __asan_load##bytes##_noabort(Address at) { check(at, bytes, "reads"); } \
    EXPORT void __asan_store##bytes##_noabort(Address at) { check(at, bytes, "writes"); }
CHECK(1) CHECK(2) CHECK(4) CHECK(8) CHECK(16)
EXPORT void __asan_loadN_noabort(Address at, size_t n) { check(at, n, "reads"); }
EXPORT void __asan_storeN_noabort(Address at, size_t n) { check(at, n, "writes"); }
EXPORT void __asan_handle_no_return(void) {}
