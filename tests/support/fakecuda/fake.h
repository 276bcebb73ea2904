/* A CUDA driver without a GPU, inside: what its files share.  The rules and how to use it: __init__.py.
 *
 * It stands in for libcuda.so.1, in several processes that share one machine: a folder
 * (FAKECUDA_DIR) with the GPUs, their memory (files, so that the kernel gives it back with the last process that holds
 * it) and the faults that a test asks for.  An error that CUDA documents is returned.  What CUDA leaves undefined ends
 * the process with one line that begins with FAKECUDA.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int Result;
typedef uint64_t Address;
enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, DEVICE_UNAVAILABLE = 46, NO_DEVICE = 100,
    INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500,
    NOT_READY = 600, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_IMPLICIT = 906, UNKNOWN = 999
};
enum { MAX_DEVICES = 16, GRAIN = 2 << 20 };

#define EXPORT __attribute__((visibility("default")))
#define DIE(...) (fprintf(stderr, "FAKECUDA: " __VA_ARGS__), fputc('\n', stderr), abort())

/* --- devices.c: the machine, its GPUs, contexts and faults ------------------------------------------------------- */

/* One GPU, or one MIG instance of a GPU.  `visible`: its number in this process, or -1. */
struct Device {
    unsigned char uuid[16], parent[16];
    size_t bytes;
    bool mig, descriptors, exclusive;
    char pci[16];
    int visible;
};
/* A GPU's primary context in this process, for good.  `resources`: streams, events and registrations that were made in it
 * and not given back; the context's file has a byte for each behind its own, so that other processes can count them. */
struct Context {
    int device, resources, file;
};
enum { CONTEXT_BYTES = 1 << 20 };
void count_resource(struct Context *context, int by);
extern struct Device devices[MAX_DEVICES];
extern int device_count;

/* The GPU of the calling thread's current context, or -1. */
int current_device(void);
struct Context *current_context(void);
/* The GPU that this process calls `ordinal`, or -1. */
int device_of(int ordinal);
/* FAKECUDA_DIR/part; in a buffer of the caller's. */
const char *path_of(char buffer[512], const char *part);
/* Whether a test wants this of `name` now, on this GPU (-1: any). */
bool hangs(const char *name, int device);
bool lost(int device);

/* The begin of each call of the driver: planted faults first, then what CUDA demands of any call. */
enum { ANYTIME = 0, INITIALISED = 1, CONTEXT = 2, NOT_CAPTURING = 4 };
Result enter(const char *name, int demands, int device);
#define ENTER(demands) ENTER_ON(demands, current_device())
#define ENTER_ON(demands, device) \
    do { Result entered = enter(__func__, demands, device); if (entered) return entered; } while (0)

/* --- machine.c: the machine's memory ----------------------------------------------------------------------------- */

/* A file that counts as `size` bytes of the device's memory while any process has it open; -1: there is no room. */
int take_memory(int device, const char *kind, size_t size, char name[64]);
bool others_hold(int device, const char *kind);
/* Until the descriptor is closed, no other process looks at the memory or takes some. */
int lock_machine(void);

/* --- memory.c: device memory and its mappings -------------------------------------------------------------------- */

/* Where `size` bytes lie as a whole. */
enum Place { DEVICE_MEMORY, REGISTERED, PAGEABLE, NOWHERE };
enum Place place_of(Address at, size_t size, int device);
/* The caller holds this for reading while a copy or a kernel runs, and memory.c and host.c for writing while they map. */
extern pthread_rwlock_t mappings;

/* --- host.c: registered host memory ------------------------------------------------------------------------------ */

/* Where bytes that no reserved address has lie: REGISTERED, PAGEABLE, or NOWHERE as a whole. */
enum Place host_place_of(Address at, size_t size);

/* --- streams.c: work in order, late ------------------------------------------------------------------------------ */

/* Wait for all work of this process. */
void drain(void);
/* End the process if queued work copies from or to this range. */
void assert_unused(const char *what, Address at, size_t size);
bool capturing(void);
void spoil_capture(void);

/* --- kernels.c: compiled for the host ---------------------------------------------------------------------------- */

struct Function;
size_t argument_bytes(const struct Function *function);
void run_kernel(const struct Function *function, unsigned grid, unsigned threads, const void *argument, int device);
