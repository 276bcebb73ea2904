/* Device memory: its mappings and its exports. */
#include "fake.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>

enum { POSIX_DESCRIPTOR = 1, READ_WRITE = 3 };
enum { OTHERS_BYTES = 0xA5 }; /* whatever the last user of the memory left in it */

/* Memory of a GPU that this process has a handle of or has mapped.  `legacy`: of cuMemAlloc, or opened from it. */
struct Physical {
    int file, device, handles, maps;
    size_t size;
    bool exportable, legacy, ours;
    char name[64];
    struct Physical *next;
};
/* Addresses that were reserved; `memory`: what is mapped there as a whole, `access`: a bit for each GPU. */
struct Mapping {
    Address at;
    size_t size;
    struct Physical *memory;
    unsigned access;
    struct Mapping *next;
};
static struct Physical *physicals;
static struct Mapping *reserved;
pthread_rwlock_t mappings = PTHREAD_RWLOCK_INITIALIZER;

/* --- addresses ---------------------------------------------------------------------------------------------------- */

static Address reserve(size_t size) {
    char *all = mmap(0, size + GRAIN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) DIE("mmap: %s", strerror(errno));
    struct Mapping *one = calloc(1, sizeof *one);
    one->at = ((Address)all + GRAIN - 1) / GRAIN * GRAIN;
    one->size = size;
    one->next = reserved;
    reserved = one;
    return one->at;
}

/* What is reserved from exactly this address on. */
static struct Mapping *reserved_at(Address at) {
    struct Mapping *one = reserved;
    while (one && one->at != at) one = one->next;
    return one;
}

static struct Mapping *mapping_of(Address at, size_t size) {
    struct Mapping *one = reserved;
    while (one && !(one->memory && one->at <= at && at + size <= one->at + one->size)) one = one->next;
    return one;
}

static void map(struct Mapping *at, struct Physical *memory, int protection) {
    if (mmap((void *)at->at, at->size, protection, MAP_SHARED | MAP_FIXED, memory->file, 0) == MAP_FAILED)
        DIE("mmap: %s", strerror(errno));
    if (at->memory != memory) memory->maps++;
    at->memory = memory;
}

/* An access to the addresses faults from now on. */
static void unmap(struct Mapping *at) {
    mmap((void *)at->at, at->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    at->memory->maps--;
    at->memory = 0;
    at->access = 0;
}

static void forget(struct Mapping *one) {
    struct Mapping **link = &reserved;
    while (*link != one) link = &(*link)->next;
    *link = one->next;
    munmap((void *)one->at, one->size);
    free(one);
}

enum Place place_of(Address at, size_t size, int device) {
    struct Mapping *mapping = mapping_of(at, size);
    if (mapping && !(mapping->access & 1u << device)) DIE("a GPU has no access (cuMemSetAccess): address=%#lx", at);
    if (mapping) return DEVICE_MEMORY;
    for (struct Mapping *one = reserved; one; one = one->next)
        if (at < one->at + one->size && one->at < at + size) return NOWHERE;
    return host_place_of(at, size);
}

/* --- physical memory ---------------------------------------------------------------------------------------------- */

static struct Physical *enter_physical(int file, int device, size_t size, const char *name) {
    struct Physical *one = calloc(1, sizeof *one);
    *one = (struct Physical){.file = file, .device = device, .handles = 1, .size = size, .next = physicals};
    snprintf(one->name, sizeof one->name, "%s", name);
    return physicals = one;
}

/* New memory of the device, with the bytes of whoever had it before; NULL: there is no room. */
static struct Physical *create(int device, size_t size) {
    char name[64];
    int file = take_memory(device, "memory", size, name);
    if (file < 0) return 0;
    void *bytes = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (bytes == MAP_FAILED) DIE("mmap: %s", strerror(errno));
    memset(bytes, OTHERS_BYTES, size);
    munmap(bytes, size);
    struct Physical *one = enter_physical(file, device, size, name);
    one->ours = true;
    return one;
}

/* The memory is the machine's again once no process has a handle, a mapping or a descriptor of it. */
static void release(struct Physical *one) {
    if (one->handles || one->maps) return;
    struct Physical **link = &physicals;
    while (*link != one) link = &(*link)->next;
    *link = one->next;
    close(one->file);
    free(one);
}

static struct Physical *physical_of(uint64_t handle) {
    struct Physical *one = physicals;
    while (one && ((uint64_t)one != handle || !one->handles)) one = one->next;
    return one;
}

/* --- virtual memory management ------------------------------------------------------------------------------------ */

struct Location { int type, id; };
struct AllocationProp {
    int type, handle_types;
    struct Location location;
    void *windows;
    unsigned char flags[8];
};
struct AccessDesc { struct Location location; int flags; };

EXPORT Result cuMemCreate(uint64_t *handle, size_t size, const struct AllocationProp *prop, uint64_t flags) {
    ENTER(INITIALISED | CONTEXT | NOT_CAPTURING);
    int device = device_of(prop->location.id);
    if (!size || size % GRAIN || flags || prop->type != 1 || prop->location.type != 1 || device < 0)
        return INVALID_VALUE;
    if (prop->handle_types && !devices[device].descriptors) return NOT_SUPPORTED;
    pthread_rwlock_wrlock(&mappings);
    struct Physical *one = create(device, size);
    if (one) one->exportable = prop->handle_types & POSIX_DESCRIPTOR;
    *handle = (uint64_t)one;
    pthread_rwlock_unlock(&mappings);
    return one ? OK : OUT_OF_MEMORY;
}

EXPORT Result cuMemRelease(uint64_t handle) {
    ENTER(INITIALISED | CONTEXT | NOT_CAPTURING);
    pthread_rwlock_wrlock(&mappings);
    struct Physical *one = physical_of(handle);
    if (one) {
        one->handles--;
        release(one);
    }
    pthread_rwlock_unlock(&mappings);
    return one ? OK : INVALID_VALUE;
}

EXPORT Result cuMemExportToShareableHandle(int *descriptor, uint64_t handle, int type, uint64_t flags) {
    ENTER(INITIALISED | CONTEXT | NOT_CAPTURING);
    pthread_rwlock_rdlock(&mappings);
    struct Physical *one = physical_of(handle);
    bool good = one && one->exportable && type == POSIX_DESCRIPTOR && !flags;
    /* A copy of one descriptor and not a second one: they share the lock by which the machine knows that it is held. */
    if (good && (*descriptor = fcntl(one->file, F_DUPFD_CLOEXEC, 3)) < 0) good = false;
    pthread_rwlock_unlock(&mappings);
    return good ? OK : INVALID_VALUE;
}

EXPORT Result cuMemImportFromShareableHandle(uint64_t *handle, void *descriptor, int type) {
    ENTER(INITIALISED | CONTEXT | NOT_CAPTURING);
    char link[64], target[512] = "", path[512];
    struct stat status;
    int device = -1, given = (int)(intptr_t)descriptor;
    snprintf(link, sizeof link, "/proc/self/fd/%d", given);
    path_of(path, "memory/");
    if (type != POSIX_DESCRIPTOR || readlink(link, target, sizeof target - 1) < 0 || fstat(given, &status) ||
        strncmp(target, path, strlen(path)) || sscanf(target + strlen(path), "%d-memory-", &device) != 1)
        return INVALID_VALUE;
    if (devices[device].visible < 0) return INVALID_DEVICE;
    pthread_rwlock_wrlock(&mappings);
    int file = fcntl(given, F_DUPFD_CLOEXEC, 3);
    *handle = (uint64_t)enter_physical(file, device, status.st_size, target + strlen(path));
    pthread_rwlock_unlock(&mappings);
    return OK;
}

EXPORT Result cuMemAddressReserve(Address *at, size_t size, size_t alignment, Address wanted, uint64_t flags) {
    ENTER(INITIALISED | CONTEXT | NOT_CAPTURING);
    if (!size || size % GRAIN || alignment > GRAIN || wanted || flags) return INVALID_VALUE;
    pthread_rwlock_wrlock(&mappings);
    *at = reserve(size);
    pthread_rwlock_unlock(&mappings);
    return OK;
}

EXPORT Result cuMemMap(Address at, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
    ENTER(INITIALISED | CONTEXT | NOT_CAPTURING);
    pthread_rwlock_wrlock(&mappings);
    struct Physical *memory = physical_of(handle);
    struct Mapping *there = reserved_at(at);
    bool good = memory && there && !there->memory && there->size == size && size <= memory->size && !offset && !flags;
    if (good) map(there, memory, PROT_NONE);
    pthread_rwlock_unlock(&mappings);
    return good ? OK : INVALID_VALUE;
}

EXPORT Result cuMemSetAccess(Address at, size_t size, const struct AccessDesc *wanted, size_t count) {
    ENTER(INITIALISED | CONTEXT | NOT_CAPTURING);
    pthread_rwlock_wrlock(&mappings);
    struct Mapping *there = reserved_at(at);
    bool good = there && there->memory && there->size == size && !there->memory->legacy;
    for (size_t i = 0; good && i < count; i++) {
        int device = device_of(wanted[i].location.id);
        good = wanted[i].location.type == 1 && device == there->memory->device && wanted[i].flags == READ_WRITE;
        if (good) there->access |= 1u << device;
    }
    if (good) map(there, there->memory, PROT_READ | PROT_WRITE);
    pthread_rwlock_unlock(&mappings);
    return good ? OK : INVALID_VALUE;
}

EXPORT Result cuMemUnmap(Address at, size_t size) {
    ENTER(INITIALISED | CONTEXT | NOT_CAPTURING);
    assert_unused("memory is unmapped", at, size);
    pthread_rwlock_wrlock(&mappings);
    struct Mapping *there = reserved_at(at);
    struct Physical *memory = there ? there->memory : 0;
    bool good = memory && there->size == size && !memory->legacy;
    if (good) {
        unmap(there);
        release(memory);
    }
    pthread_rwlock_unlock(&mappings);
    return good ? OK : INVALID_VALUE;
}

EXPORT Result cuMemAddressFree(Address at, size_t size) {
    ENTER(INITIALISED | CONTEXT | NOT_CAPTURING);
    pthread_rwlock_wrlock(&mappings);
    struct Mapping *there = reserved_at(at);
    bool good = there && there->size == size && !there->memory;
    if (good) forget(there);
    pthread_rwlock_unlock(&mappings);
    return good ? OK : INVALID_VALUE;
}

/* --- allocations and their legacy handles -------------------------------------------------------------------------- */

struct IpcHandle { char text[64]; };

/* Map the memory for good, with access for its own GPU. */
static Address mapped(struct Physical *memory) {
    Address at = reserve(memory->size);
    memory->legacy = true;
    map(reserved_at(at), memory, PROT_READ | PROT_WRITE);
    reserved_at(at)->access = 1u << memory->device;
    return at;
}

EXPORT Result cuMemAlloc_v2(Address *at, size_t size) {
    ENTER(INITIALISED | CONTEXT | NOT_CAPTURING);
    if (!size) return INVALID_VALUE;
    pthread_rwlock_wrlock(&mappings);
    struct Physical *one = create(current_device(), size);
    if (one) *at = mapped(one);
    pthread_rwlock_unlock(&mappings);
    return one ? OK : OUT_OF_MEMORY;
}

/* The legacy memory at exactly this address; `ours`: allocated here, otherwise opened. */
static struct Mapping *legacy_at(Address at, bool ours) {
    struct Mapping *there = reserved_at(at);
    return there && there->memory && there->memory->legacy && there->memory->ours == ours ? there : 0;
}

static void let_go(struct Mapping *there) {
    struct Physical *memory = there->memory;
    unmap(there);
    forget(there);
    memory->handles--;
    release(memory);
}

EXPORT Result cuMemFree_v2(Address at) {
    ENTER(INITIALISED | CONTEXT | NOT_CAPTURING);
    drain(); /* as CUDA does */
    pthread_rwlock_wrlock(&mappings);
    struct Mapping *there = legacy_at(at, true);
    int machine = lock_machine();
    if (there && flock(there->memory->file, LOCK_EX | LOCK_NB))
        DIE("memory is freed while another process has it mapped: %s", there->memory->name);
    close(machine);
    if (there) let_go(there);
    pthread_rwlock_unlock(&mappings);
    return there ? OK : INVALID_VALUE;
}

EXPORT Result cuIpcGetMemHandle(struct IpcHandle *handle, Address at) {
    ENTER(INITIALISED | CONTEXT | NOT_CAPTURING);
    pthread_rwlock_rdlock(&mappings);
    struct Mapping *there = mapping_of(at, 1);
    bool good = there && there->memory->legacy && there->memory->ours;
    if (good && (there->at != at || there->size % GRAIN))
        DIE("a part of an allocation is exported, whose base the other process would map: address=%#lx", at);
    memset(handle, 0, sizeof *handle);
    if (good) snprintf(handle->text, sizeof handle->text, "%s", there->memory->name);
    pthread_rwlock_unlock(&mappings);
    return good ? OK : INVALID_VALUE;
}

EXPORT Result cuIpcOpenMemHandle_v2(Address *at, struct IpcHandle handle, unsigned flags) {
    ENTER(INITIALISED | CONTEXT | NOT_CAPTURING);
    int device, process, number;
    char path[512], part[128], text[65] = "";
    struct stat status;
    memcpy(text, handle.text, 64);
    if (sscanf(text, "%d-memory-%d-%d", &device, &process, &number) != 3) return INVALID_VALUE;
    if (process == getpid()) return INVALID_CONTEXT;
    if (kill(process, 0) && errno == ESRCH) return INVALID_HANDLE; /* of a dead process */
    snprintf(part, sizeof part, "memory/%s", text);
    int file = open(path_of(path, part), O_RDWR | O_CLOEXEC);
    if (file < 0 || fstat(file, &status) || status.st_uid != geteuid() || flock(file, LOCK_SH)) {
        if (file >= 0) close(file);
        return INVALID_HANDLE; /* not of one's own user */
    }
    if (devices[device].visible < 0) return INVALID_DEVICE;
    pthread_rwlock_wrlock(&mappings);
    *at = mapped(enter_physical(file, device, status.st_size, text));
    pthread_rwlock_unlock(&mappings);
    return OK;
}

EXPORT Result cuIpcCloseMemHandle(Address at) {
    ENTER(INITIALISED | CONTEXT | NOT_CAPTURING);
    assert_unused("memory is closed", at, 1);
    pthread_rwlock_wrlock(&mappings);
    struct Mapping *there = legacy_at(at, false);
    if (there) let_go(there);
    pthread_rwlock_unlock(&mappings);
    return there ? OK : INVALID_VALUE;
}
