/* The machine of the fake driver: its GPUs, the contexts of this process, and the faults that a test plants. */
#include "fake.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>

struct Device devices[MAX_DEVICES];
int device_count;
static struct Context contexts[MAX_DEVICES];
static bool initialised, forked;
static __thread struct Context *current;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

const char *path_of(char buffer[512], const char *part) {
    const char *folder = getenv("FAKECUDA_DIR");
    if (!folder) DIE("FAKECUDA_DIR is not set");
    snprintf(buffer, 512, "%s/%s", folder, part);
    return buffer;
}

/* --- faults -------------------------------------------------------------------------------------------------------
 *
 * FAKECUDA_DIR/faults/NAME, with one line: `hang`, or a result, then optionally ` device=N` and ` pid=N`.  NAME is a
 * function of the driver; `copies`, which hang in their streams; or `lost`, after which the GPU answers nothing.  The
 * first byte of FAKECUDA_DIR/planted says whether there may be any: to look for files takes longer than most calls.
 */

static bool any_planted(void) {
    static const char *volatile there;
    if (!there) {
        char path[512];
        int file = open(path_of(path, "planted"), O_RDONLY | O_CLOEXEC);
        void *found = mmap(0, 1, PROT_READ, MAP_SHARED, file, 0);
        if (found == MAP_FAILED) DIE("%s: %s", path, strerror(errno));
        close(file);
        there = found;
    }
    return *there;
}

static bool planted(const char *name, int device, int *result) {
    char path[512], part[128], line[128] = "";
    if (!any_planted()) return false;
    snprintf(part, sizeof part, "faults/%s", name);
    FILE *file = fopen(path_of(path, part), "re");
    if (!file) return false;
    bool found = fgets(line, sizeof line, file);
    fclose(file);
    char *of = strstr(line, "device="), *by = strstr(line, "pid=");
    if (!found || (of && atoi(of + 7) != device) || (by && atoi(by + 4) != getpid())) return false;
    *result = atoi(line);
    return true;
}

bool hangs(const char *name, int device) {
    int result;
    return planted(name, device, &result) && result == 0;
}

bool lost(int device) {
    int result;
    return planted("lost", device, &result);
}

Result enter(const char *name, int demands, int device) {
    int result;
    while (planted(name, device, &result)) {
        if (result) return result;
        usleep(5000);
    }
    if (demands && (!initialised || forked)) return NOT_INITIALIZED;
    if (demands && lost(device)) return UNKNOWN;
    if (demands & CONTEXT && !current_context()) return INVALID_CONTEXT;
    if (demands & NOT_CAPTURING && capturing()) {
        spoil_capture();
        return CAPTURE_UNSUPPORTED;
    }
    return OK;
}

/* --- GPUs ---------------------------------------------------------------------------------------------------------
 *
 * FAKECUDA_DIR/devices, a line for each: UUID BYTES [mig=UUID of the whole GPU] [no-descriptors] [exclusive] [pci=ID]
 */

static void read_uuid(const char *digits, unsigned char uuid[16]) {
    for (int i = 0; i < 16; i++)
        if (sscanf(digits + 2 * i, "%2hhx", &uuid[i]) != 1) DIE("devices: not a UUID: %.40s", digits);
}

static void read_devices(void) {
    char path[512], line[256];
    FILE *file = fopen(path_of(path, "devices"), "re");
    if (!file) DIE("no GPUs are described: %s", path);
    for (device_count = 0; device_count < MAX_DEVICES && fgets(line, sizeof line, file); device_count++) {
        struct Device *device = &devices[device_count];
        memset(device, 0, sizeof *device);
        read_uuid(line, device->uuid);
        device->bytes = strtoull(line + 33, 0, 0);
        device->descriptors = !strstr(line, "no-descriptors");
        device->exclusive = strstr(line, "exclusive");
        const char *mig = strstr(line, "mig="), *pci = strstr(line, "pci=");
        if ((device->mig = mig)) read_uuid(mig + 4, device->parent);
        if (pci) sscanf(pci + 4, "%15s", device->pci);
        device->visible = -1;
    }
    fclose(file);
}

/* Whether one name in CUDA_VISIBLE_DEVICES is this GPU's: its number, GPU-UUID or MIG-UUID. */
static bool named(const char *name, int device) {
    const struct Device *one = &devices[device];
    char text[48] = "", *end;
    long number = strtol(name, &end, 10);
    if (end != name && *end == 0) return number == device;
    const unsigned char *u = one->uuid;
    snprintf(text, sizeof text, "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
             one->mig ? "MIG" : "GPU", u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12],
             u[13], u[14], u[15]);
    return strlen(name) > 4 && strncmp(text, name, strlen(name)) == 0;
}

/* Number the visible GPUs. A process sees one MIG instance at most, and no whole GPU beside it. */
static void choose_devices(void) {
    const char *wanted = getenv("CUDA_VISIBLE_DEVICES");
    int count = 0;
    bool mig = false;
    if (!wanted) {
        for (int device = 0; device < device_count && !mig; device++) {
            mig = devices[device].mig;
            if (!mig || !count) devices[device].visible = count++;
        }
        return;
    }
    char names[512], *place = names, *name;
    snprintf(names, sizeof names, "%s", wanted);
    while ((name = strsep(&place, ",")) && !mig) {
        int found = -1;
        for (int device = 0; device < device_count; device++)
            if (found < 0 && named(name, device)) found = device;
        if (found < 0 || devices[found].visible >= 0) return; /* the names behind an unknown one do not count */
        mig = devices[found].mig;
        if (!mig || !count) devices[found].visible = count++;
    }
}

int device_of(int ordinal) {
    for (int device = 0; device < device_count; device++)
        if (devices[device].visible == ordinal) return device;
    return -1;
}

static void in_child(void) { forked = true; }

EXPORT Result cuInit(unsigned flags) {
    ENTER(ANYTIME);
    if (flags) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (!initialised) {
        read_devices();
        choose_devices();
        pthread_atfork(0, 0, in_child);
        initialised = true;
    }
    pthread_mutex_unlock(&lock);
    return device_of(0) < 0 ? NO_DEVICE : OK;
}

EXPORT Result cuGetErrorName(Result result, const char **name) {
    static const struct { Result result; const char *name; } names[] = {
        {INVALID_VALUE, "INVALID_VALUE"}, {OUT_OF_MEMORY, "OUT_OF_MEMORY"}, {NOT_INITIALIZED, "NOT_INITIALIZED"},
        {DEVICE_UNAVAILABLE, "DEVICE_UNAVAILABLE"}, {NO_DEVICE, "NO_DEVICE"}, {INVALID_DEVICE, "INVALID_DEVICE"},
        {INVALID_IMAGE, "INVALID_IMAGE"}, {INVALID_CONTEXT, "INVALID_CONTEXT"}, {INVALID_HANDLE, "INVALID_HANDLE"},
        {NOT_FOUND, "NOT_FOUND"}, {NOT_READY, "NOT_READY"}, {ALREADY_REGISTERED, "HOST_MEMORY_ALREADY_REGISTERED"},
        {NOT_REGISTERED, "HOST_MEMORY_NOT_REGISTERED"}, {NOT_SUPPORTED, "NOT_SUPPORTED"},
        {CAPTURE_UNSUPPORTED, "STREAM_CAPTURE_UNSUPPORTED"}, {CAPTURE_INVALIDATED, "STREAM_CAPTURE_INVALIDATED"},
        {CAPTURE_IMPLICIT, "STREAM_CAPTURE_IMPLICIT"}, {UNKNOWN, "UNKNOWN"},
    };
    static __thread char text[64];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].result == result) {
            snprintf(text, sizeof text, "CUDA_ERROR_%s", names[i].name);
            *name = text;
            return OK;
        }
    return INVALID_VALUE;
}

EXPORT Result cuDeviceGetCount(int *count) {
    ENTER(INITIALISED);
    *count = 0;
    while (device_of(*count) >= 0) ++*count;
    return OK;
}

/* The whole GPU's, also for an instance of it. */
EXPORT Result cuDeviceGetUuid(unsigned char uuid[16], int ordinal) {
    int device = device_of(ordinal);
    ENTER_ON(INITIALISED, device);
    if (device < 0) return INVALID_DEVICE;
    memcpy(uuid, devices[device].mig ? devices[device].parent : devices[device].uuid, 16);
    return OK;
}

EXPORT Result cuDeviceGetUuid_v2(unsigned char uuid[16], int ordinal) {
    int device = device_of(ordinal);
    ENTER_ON(INITIALISED, device);
    if (device < 0) return INVALID_DEVICE;
    memcpy(uuid, devices[device].uuid, 16);
    return OK;
}

EXPORT Result cuDeviceGetPCIBusId(char *id, int length, int ordinal) {
    int device = device_of(ordinal);
    ENTER_ON(INITIALISED, device);
    if (device < 0) return INVALID_DEVICE;
    snprintf(id, length, "%s", devices[device].pci);
    return OK;
}

EXPORT Result cuDeviceGetAttribute(int *value, int attribute, int ordinal) {
    int device = device_of(ordinal);
    ENTER_ON(INITIALISED, device);
    if (device < 0) return INVALID_DEVICE;
    switch (attribute) {
    case 16: *value = 4; return OK;                            /* MULTIPROCESSOR_COUNT */
    case 75: *value = 9; return OK;                            /* COMPUTE_CAPABILITY_MAJOR */
    case 76: *value = 0; return OK;                            /* COMPUTE_CAPABILITY_MINOR */
    case 91: *value = 1; return OK;                            /* CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM */
    case 103: *value = devices[device].descriptors; return OK; /* HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED */
    default: return INVALID_VALUE;
    }
}

/* --- contexts ----------------------------------------------------------------------------------------------------- */

struct Context *current_context(void) { return current; }
int current_device(void) { return current ? current->device : -1; }

EXPORT Result cuDevicePrimaryCtxRetain(struct Context **context, int ordinal) {
    int device = device_of(ordinal);
    ENTER_ON(INITIALISED | NOT_CAPTURING, device);
    if (device < 0) return INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    struct Context *one = &contexts[device];
    Result result = OK;
    if (!one->file) {
        char name[64];
        int file = -1;
        if (devices[device].exclusive && others_hold(device, "context")) result = DEVICE_UNAVAILABLE;
        else if ((file = take_memory(device, "context", CONTEXT_BYTES, name)) < 0) result = OUT_OF_MEMORY;
        if (!result) *one = (struct Context){.device = device, .file = file};
    }
    *context = one;
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT Result cuCtxSetCurrent(struct Context *context) {
    ENTER_ON(INITIALISED, context ? context->device : -1);
    current = context;
    return OK;
}

void count_resource(struct Context *context, int by) {
    pthread_mutex_lock(&lock);
    context->resources += by;
    if (ftruncate(context->file, CONTEXT_BYTES + context->resources)) DIE("ftruncate: %s", strerror(errno));
    pthread_mutex_unlock(&lock);
}
