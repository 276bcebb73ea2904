/* Streams, which are threads that run late; events; copies; captured graphs. */
#include "fake.h"

#include <time.h>

enum Kind { COPY, FILL, LAUNCH, RECORD, WAIT, HOST };

struct Event {
    struct Context *context;
    unsigned long recorded, done;
    bool alive;
    struct Event *next;
};
/* `owned`: a copy of pageable memory, or the argument of a kernel.  `number`: which record of the event. */
struct Job {
    enum Kind kind;
    Address to, from;
    size_t size;
    int value;
    void *owned;
    struct Event *event;
    unsigned long number;
    const struct Function *function;
    unsigned grid, threads;
    void (*host)(void *);
    void *data;
    struct Job *next;
};
struct Graph {
    struct Job *head, **tail;
    struct Graph *next;
};
/* `running`: the job that its thread has taken.  `graph`: what is captured, instead of being run. */
struct Stream {
    pthread_t thread;
    struct Context *context;
    struct Job *head, **tail, *running;
    bool alive;
    struct Graph *graph;
    struct Stream *next;
};
/* Neither streams nor events are ever freed, so that a use after their end is known as one. */
static struct Stream *streams, *default_streams[MAX_DEVICES];
static struct Event *events;
static int captures;
static bool spoilt;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

bool capturing(void) { return captures > 0; }
void spoil_capture(void) { spoilt = true; }

/* --- the threads -------------------------------------------------------------------------------------------------- */

/* Between a half and the whole of FAKECUDA_LAG_US microseconds, so that work that nobody waits for is not done yet. */
static void lag(unsigned *seed) {
    const char *most = getenv("FAKECUDA_LAG_US");
    int us = most ? atoi(most) : 300;
    if (us > 1) usleep(us / 2 + rand_r(seed) % (us / 2));
}

static void check_copy(const char *what, Address at, size_t size, int device) {
    if (place_of(at, size, device) == NOWHERE) DIE("%s memory that was given back meanwhile: address=%#lx", what, at);
}

static void perform(const struct Job *job, int device) {
    if (job->kind == HOST) job->host(job->data);
    pthread_rwlock_rdlock(&mappings);
    switch (job->kind) {
    case COPY:
        check_copy("a copy writes", job->to, job->size, device);
        if (!job->owned) check_copy("a copy reads", job->from, job->size, device);
        memmove((void *)job->to, job->owned ? job->owned : (void *)job->from, job->size);
        break;
    case FILL:
        check_copy("a fill writes", job->to, job->size, device);
        memset((void *)job->to, job->value, job->size);
        break;
    case LAUNCH: run_kernel(job->function, job->grid, job->threads, job->owned, device); break;
    default: break;
    }
    pthread_rwlock_unlock(&mappings);
}

static void *run_stream(void *argument) {
    struct Stream *stream = argument;
    unsigned seed = (unsigned)time(0) ^ (unsigned)(uintptr_t)stream;
    pthread_mutex_lock(&lock);
    while (stream->head || stream->alive) {
        struct Job *job = stream->head;
        if (!job) {
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        if (!(stream->head = job->next)) stream->tail = &stream->head;
        stream->running = job;
        while (job->kind == WAIT && job->event->done < job->number) pthread_cond_wait(&changed, &lock);
        pthread_mutex_unlock(&lock);
        lag(&seed);
        int device = stream->context->device;
        while ((job->kind == COPY && hangs("copies", device)) || lost(device)) usleep(5000);
        perform(job, device);
        pthread_mutex_lock(&lock);
        if (job->kind == RECORD && job->event->done < job->number) job->event->done = job->number;
        stream->running = 0;
        free(job->owned);
        free(job);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

static struct Stream *start(struct Context *context) {
    struct Stream *stream = calloc(1, sizeof *stream);
    *stream = (struct Stream){.context = context, .tail = &stream->head, .alive = true, .next = streams};
    streams = stream;
    pthread_create(&stream->thread, 0, run_stream, stream);
    pthread_detach(stream->thread);
    return stream;
}

/* The stream that a caller names; 0 is the GPU's default stream. With the lock held. */
static struct Stream *stream_of(Address handle) {
    if (!handle) {
        struct Stream **stream = &default_streams[current_device()];
        return *stream ? *stream : (*stream = start(current_context()));
    }
    struct Stream *one = streams;
    while (one && (Address)one != handle) one = one->next;
    if (!one || !one->alive) DIE("a stream is used that does not exist, or was destroyed: %#lx", handle);
    return one;
}

static struct Event *event_of(Address handle) {
    struct Event *one = events;
    while (one && (Address)one != handle) one = one->next;
    if (!one || !one->alive) DIE("an event is used that does not exist, or was destroyed: %#lx", handle);
    return one;
}

/* Queue the job, or capture it. With the lock held. */
static Result push(struct Stream *stream, struct Job wanted) {
    if (stream->context != current_context()) return INVALID_HANDLE;
    if (captures && stream == default_streams[stream->context->device]) {
        spoil_capture();
        return CAPTURE_IMPLICIT;
    }
    struct Job *job = malloc(sizeof *job), ***tail = stream->graph ? &stream->graph->tail : &stream->tail;
    *job = wanted;
    **tail = job;
    *tail = &job->next;
    pthread_cond_broadcast(&changed);
    return OK;
}

static bool idle(const struct Stream *stream) { return !stream->head && !stream->running; }

/* Wait, without the lock meanwhile; UNKNOWN where the GPU is lost. */
static Result wait_while(bool (*busy)(const void *, unsigned long), const void *of, unsigned long number, int device) {
    while (busy(of, number)) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        if ((until.tv_nsec += 5000000) >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
        pthread_cond_timedwait(&changed, &lock, &until);
        if (lost(device)) return UNKNOWN;
    }
    return OK;
}

static bool stream_busy(const void *stream, unsigned long number) { return !idle(stream); }
static bool event_pending(const void *event, unsigned long number) {
    return ((const struct Event *)event)->done < number;
}

void drain(void) {
    pthread_mutex_lock(&lock);
    for (struct Stream *stream = streams; stream; stream = stream->next)
        wait_while(stream_busy, stream, 0, stream->context->device);
    pthread_mutex_unlock(&lock);
}

static bool touches(const struct Job *job, Address at, size_t size) {
    if (!job || (job->kind != COPY && job->kind != FILL)) return false;
    bool reads = job->kind == COPY && !job->owned && job->from < at + size && at < job->from + job->size;
    return reads || (job->to < at + size && at < job->to + job->size);
}

void assert_unused(const char *what, Address at, size_t size) {
    pthread_mutex_lock(&lock);
    for (struct Stream *stream = streams; stream; stream = stream->next) {
        bool used = touches(stream->running, at, size);
        for (struct Job *job = stream->head; job; job = job->next) used |= touches(job, at, size);
        if (used) DIE("%s while a copy uses it: address=%#lx", what, at);
    }
    pthread_mutex_unlock(&lock);
}

/* --- streams ------------------------------------------------------------------------------------------------------ */

EXPORT Result cuStreamCreate(Address *handle, unsigned flags) {
    ENTER(INITIALISED | CONTEXT);
    if (flags != 1) DIE("a stream would wait for the default stream, and it for the stream: flags=%u", flags);
    pthread_mutex_lock(&lock);
    *handle = (Address)start(current_context());
    count_resource(current_context(), 1);
    pthread_mutex_unlock(&lock);
    return OK;
}

EXPORT Result cuStreamDestroy_v2(Address handle) {
    ENTER(INITIALISED | CONTEXT);
    pthread_mutex_lock(&lock);
    struct Stream *stream = stream_of(handle);
    stream->alive = false; /* its thread ends when what is queued is done */
    count_resource(stream->context, -1);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return OK;
}

EXPORT Result cuStreamSynchronize(Address handle) {
    ENTER(INITIALISED | CONTEXT | NOT_CAPTURING);
    pthread_mutex_lock(&lock);
    struct Stream *stream = stream_of(handle);
    Result result = wait_while(stream_busy, stream, 0, stream->context->device);
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT Result cuMemcpyAsync(Address to, Address from, size_t size, Address handle) {
    ENTER(INITIALISED | CONTEXT);
    if (!size) return OK;
    pthread_rwlock_rdlock(&mappings);
    enum Place target = place_of(to, size, current_device()), source = place_of(from, size, current_device());
    pthread_rwlock_unlock(&mappings);
    if (target == NOWHERE || source == NOWHERE) return INVALID_VALUE;
    struct Job job = {.kind = COPY, .to = to, .from = from, .size = size};
    if (source == PAGEABLE) job.owned = memcpy(malloc(size), (void *)from, size); /* read before the call returns */
    pthread_mutex_lock(&lock);
    struct Stream *stream = stream_of(handle);
    Result result = push(stream, job);
    if (!result && target == PAGEABLE && !stream->graph) /* written before the call returns */
        result = wait_while(stream_busy, stream, 0, stream->context->device);
    pthread_mutex_unlock(&lock);
    return result;
}

/* On the default stream, without a wait: the call returns before the bytes are there. */
EXPORT Result cuMemsetD8_v2(Address at, unsigned char value, size_t size) {
    ENTER(INITIALISED | CONTEXT | NOT_CAPTURING);
    pthread_rwlock_rdlock(&mappings);
    enum Place place = place_of(at, size, current_device());
    pthread_rwlock_unlock(&mappings);
    if (place != DEVICE_MEMORY) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    Result result = push(stream_of(0), (struct Job){.kind = FILL, .to = at, .size = size, .value = value});
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT Result cuLaunchHostFunc(Address handle, void (*function)(void *), void *data) {
    ENTER(INITIALISED | CONTEXT);
    pthread_mutex_lock(&lock);
    Result result = push(stream_of(handle), (struct Job){.kind = HOST, .host = function, .data = data});
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT Result cuLaunchKernel(
    const struct Function *function, unsigned grid, unsigned grid_y, unsigned grid_z, unsigned threads,
    unsigned threads_y, unsigned threads_z, unsigned shared, Address handle, void **parameters, void **extra
) {
    ENTER(INITIALISED | CONTEXT);
    if (!grid || !threads || threads > 1024 || grid_y * grid_z * threads_y * threads_z != 1) return INVALID_VALUE;
    size_t bytes = argument_bytes(function);
    pthread_mutex_lock(&lock);
    struct Job job = {.kind = LAUNCH, .function = function, .grid = grid, .threads = threads};
    job.owned = memcpy(aligned_alloc(16, (bytes + 15) / 16 * 16), parameters[0], bytes);
    Result result = push(stream_of(handle), job);
    pthread_mutex_unlock(&lock);
    return result;
}

/* --- events ------------------------------------------------------------------------------------------------------- */

EXPORT Result cuEventCreate(Address *handle, unsigned flags) {
    ENTER(INITIALISED | CONTEXT);
    pthread_mutex_lock(&lock);
    struct Event *event = calloc(1, sizeof *event);
    *event = (struct Event){.context = current_context(), .alive = true, .next = events};
    events = event;
    count_resource(event->context, 1);
    *handle = (Address)event;
    pthread_mutex_unlock(&lock);
    return OK;
}

EXPORT Result cuEventDestroy_v2(Address handle) {
    ENTER(INITIALISED | CONTEXT);
    pthread_mutex_lock(&lock);
    struct Event *event = event_of(handle);
    event->alive = false;
    count_resource(event->context, -1);
    pthread_mutex_unlock(&lock);
    return OK;
}

EXPORT Result cuEventRecord(Address handle, Address stream) {
    ENTER(INITIALISED | CONTEXT);
    pthread_mutex_lock(&lock);
    struct Event *event = event_of(handle);
    Result result = push(stream_of(stream), (struct Job){.kind = RECORD, .event = event, .number = event->recorded + 1});
    if (!result) event->recorded++;
    pthread_mutex_unlock(&lock);
    return result;
}

/* The stream waits for the event's last record so far, whatever is recorded later. */
EXPORT Result cuStreamWaitEvent(Address stream, Address handle, unsigned flags) {
    ENTER(INITIALISED | CONTEXT);
    pthread_mutex_lock(&lock);
    struct Event *event = event_of(handle);
    Result result = push(stream_of(stream), (struct Job){.kind = WAIT, .event = event, .number = event->recorded});
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT Result cuEventQuery(Address handle) {
    ENTER(INITIALISED | CONTEXT | NOT_CAPTURING);
    pthread_mutex_lock(&lock);
    struct Event *event = event_of(handle);
    Result result = event->done < event->recorded ? NOT_READY : OK;
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT Result cuEventSynchronize(Address handle) {
    ENTER(INITIALISED | CONTEXT | NOT_CAPTURING);
    pthread_mutex_lock(&lock);
    struct Event *event = event_of(handle);
    Result result = wait_while(event_pending, event, event->recorded, event->context->device);
    pthread_mutex_unlock(&lock);
    return result;
}

/* --- graphs ------------------------------------------------------------------------------------------------------- */

/* Only the global mode: while any stream is captured, calls that may not be captured fail on every thread, and spoil
 * the capture. */
EXPORT Result cuStreamBeginCapture(Address handle, int mode) {
    ENTER(INITIALISED | CONTEXT);
    if (!handle) return CAPTURE_UNSUPPORTED;
    if (mode != 0) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct Stream *stream = stream_of(handle);
    stream->graph = calloc(1, sizeof *stream->graph);
    stream->graph->tail = &stream->graph->head;
    if (!captures++) spoilt = false;
    pthread_mutex_unlock(&lock);
    return OK;
}

EXPORT Result cuStreamEndCapture(Address handle, struct Graph **graph) {
    ENTER(INITIALISED | CONTEXT);
    pthread_mutex_lock(&lock);
    struct Stream *stream = stream_of(handle);
    *graph = spoilt ? 0 : stream->graph;
    Result result = !stream->graph ? INVALID_VALUE : spoilt ? CAPTURE_INVALIDATED : OK;
    captures -= stream->graph != 0;
    stream->graph = 0;
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT Result cuGraphInstantiateWithFlags(struct Graph **executable, struct Graph *graph, uint64_t flags) {
    ENTER(INITIALISED | CONTEXT | NOT_CAPTURING);
    *executable = graph;
    return OK;
}

EXPORT Result cuGraphLaunch(struct Graph *executable, Address handle) {
    ENTER(INITIALISED | CONTEXT);
    pthread_mutex_lock(&lock);
    struct Stream *stream = stream_of(handle);
    Result result = OK;
    for (struct Job *job = executable->head; job && !result; job = job->next) {
        struct Job again = *job;
        again.next = 0;
        size_t bytes = job->kind == LAUNCH ? argument_bytes(job->function) : job->size;
        if (job->owned) again.owned = memcpy(malloc(bytes), job->owned, bytes);
        result = push(stream, again);
    }
    pthread_mutex_unlock(&lock);
    return result;
}
