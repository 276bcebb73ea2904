/* Pushing records, and the one call that makes a hint: it takes a flag and writes the digests into the ring as they are. */
#include "_engine.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "records are little-endian");

/* As in ring.py. */
enum { HEADER_BYTES = 16, ALIGN = 64 };
#define PADDING 0xFFFFFFFFu
/* Of a HINT record, as in wire/records.py. */
enum { HINT_BYTES = 84, MAX_NAME_BYTES = 256, TRACE_BYTES = 24, SESSION_BYTES = 16, MAX_HASH_BYTES = 64, USUAL_HASH_BYTES = 32 };

/* --- Pusher -------------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *view; /* a memoryview of the ring */
    uint8_t *ring;
    Words *words;
    PyObject *ring_bell;
    Py_ssize_t tail_line, head_line, sleeping_line;
    uint64_t tail, head, capacity; /* head: as seen last */
} Pusher;

/* The ring is of a checked layout: ring_bytes is a power of two.  So are the positions, which ring.py checked. */
static PyObject *Pusher_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *ring, *words, *ring_bell;
    Py_ssize_t lines[3], size;
    unsigned long long tail, head;
    if (!PyArg_ParseTuple(args, "OO!(nnn)KKO:Pusher", &ring, words_type, &words, &lines[0], &lines[1], &lines[2], &tail,
                          &head, &ring_bell))
        return NULL;
    Pusher *self = (Pusher *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    if ((self->view = hold(ring, 1, (void **)&self->ring, &size)) == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    self->capacity = (uint64_t)size;
    self->words = (Words *)Py_NewRef(words);
    self->ring_bell = Py_NewRef(ring_bell);
    self->tail_line = lines[0], self->head_line = lines[1], self->sleeping_line = lines[2];
    self->tail = tail, self->head = head;
    return (PyObject *)self;
}

static void Pusher_dealloc(Pusher *self)
{
    Py_XDECREF(self->view);
    Py_XDECREF(self->words);
    Py_XDECREF(self->ring_bell);
    release((PyObject *)self);
}

static uint64_t max_payload(Pusher *self) { return self->capacity / 2 - HEADER_BYTES; }

/* Returns the bytes that a record takes, with padding before it where it does not fit in front of the ring's end. */
static uint64_t bytes_taken(Pusher *self, uint64_t length)
{
    uint64_t need = (length + HEADER_BYTES + ALIGN - 1) & ~(uint64_t)(ALIGN - 1);
    uint64_t to_end = self->capacity - (self->tail & (self->capacity - 1));
    return need <= to_end ? need : to_end + need;
}

/* Returns whether a record of so many payload bytes, at most max_payload(), fits now; -1 with an exception. */
static int fits(Pusher *self, uint64_t length)
{
    uint64_t taken = bytes_taken(self, length);
    if (self->tail + taken - self->head <= self->capacity)
        return 1;
    _Atomic uint64_t *word = word_of(self->words, self->head_line);
    if (word == NULL)
        return -1;
    /* SYNC head: record space free in push */
    uint64_t head = order_load_acquire(word);
    if (self->tail - head > self->capacity) {
        corrupt("ring head is impossible: head=%llu tail=%llu capacity=%llu", (unsigned long long)head,
                (unsigned long long)self->tail, (unsigned long long)self->capacity);
        return -1;
    }
    self->head = head;
    return self->tail + taken - head <= self->capacity;
}

/* Writes the header of a record that fits, and padding before it where needed. Returns where its payload goes. */
static uint8_t *start_record(Pusher *self, uint32_t length, uint32_t kind)
{
    uint8_t *ring = self->ring;
    uint64_t position = self->tail & (self->capacity - 1), start = self->tail;
    uint64_t need = ((uint64_t)length + HEADER_BYTES + ALIGN - 1) & ~(uint64_t)(ALIGN - 1);
    if (need > self->capacity - position) {
        uint32_t padding[2] = {0, PADDING};
        memcpy(ring + position, padding, 8);
        memcpy(ring + position + 8, &start, 8);
        start += self->capacity - position;
        position = 0;
    }
    uint32_t header[2] = {length, kind};
    memcpy(ring + position, header, 8);
    memcpy(ring + position + 8, &start, 8);
    return ring + position + HEADER_BYTES;
}

/* Publishes the record that start_record began, and rings where the consumer sleeps; -1 with an exception. */
static int publish_record(Pusher *self, _Atomic uint64_t *tail, _Atomic uint64_t *sleeping, uint64_t length)
{
    self->tail += bytes_taken(self, length);
    /* SYNC tail: record content visible in peek */
    /* SYNC sleep: tail and sleeping cross */
    if (order_publish(tail, self->tail, sleeping) == 0)
        return 0;
    PyObject *rung = PyObject_CallNoArgs(self->ring_bell);
    Py_XDECREF(rung);
    return rung == NULL ? -1 : 0;
}

/* Finds the words of the ring before anything is written; -1 with an exception. */
static int ring_words(Pusher *self, _Atomic uint64_t **tail, _Atomic uint64_t **sleeping)
{
    *tail = written_word(self->words, self->tail_line);
    *sleeping = *tail == NULL ? NULL : word_of(self->words, self->sleeping_line);
    return *sleeping == NULL ? -1 : 0;
}

static PyObject *Pusher_push(Pusher *self, PyObject *const *args, Py_ssize_t nargs)
{
    _Atomic uint64_t *tail, *sleeping;
    const void *payload = NULL;
    Py_ssize_t length = 0;
    if (nargs < 1 || nargs > 2)
        return PyErr_Format(PyExc_TypeError, "expected 1 or 2 arguments, got %zd", nargs);
    long long kind = PyLong_AsLongLong(args[0]);
    if (kind == -1 && PyErr_Occurred())
        return NULL;
    if (kind < 0 || kind >= PADDING)
        return PyErr_Format(PyExc_ValueError, "record kind out of bounds: kind=%lld max=%u", kind, PADDING - 1);
    if (nargs == 2 && PyObject_AsReadBuffer(args[1], &payload, &length) < 0)
        return NULL;
    if ((uint64_t)length > max_payload(self))
        return PyErr_Format(PyExc_ValueError, "record too large: payload_bytes=%zd max=%llu", length,
                            (unsigned long long)max_payload(self));
    if (ring_words(self, &tail, &sleeping) < 0)
        return NULL;
    int room = fits(self, (uint64_t)length);
    if (room <= 0)
        return room < 0 ? NULL : PyBool_FromLong(0);
    memcpy(start_record(self, (uint32_t)length, (uint32_t)kind), payload, (size_t)length);
    return publish_record(self, tail, sleeping, (uint64_t)length) < 0 ? NULL : PyBool_FromLong(1);
}

static PyObject *Pusher_fits(Pusher *self, PyObject *object)
{
    Py_ssize_t length = PyLong_AsSsize_t(object);
    if (length == -1 && PyErr_Occurred())
        return NULL;
    if (length < 0 || (uint64_t)length > max_payload(self))
        Py_RETURN_FALSE;
    int room = fits(self, (uint64_t)length);
    return room < 0 ? NULL : PyBool_FromLong(room);
}

/* Returns the request id's bytes, shortened; NULL with an exception. `*held` is to be released. */
static const char *name_of(PyObject *id, Py_ssize_t *length, PyObject **held)
{
    const char *text = PyUnicode_Check(id) ? PyUnicode_AsUTF8AndSize(id, length) : NULL;
    if (text == NULL) { /* a lone surrogate */
        PyErr_Clear();
        if ((*held = PyUnicode_AsEncodedString(id, "utf-8", "replace")) == NULL)
            return NULL;
        text = PyBytes_AsString(*held), *length = PyBytes_Size(*held);
    }
    if (*length > MAX_NAME_BYTES)
        *length = MAX_NAME_BYTES;
    return text;
}

/* Writes `value` of so many bytes, little-endian, and returns the place behind it. */
static uint8_t *put(uint8_t *at, uint64_t value, size_t bytes)
{
    memcpy(at, &value, bytes);
    return at + bytes;
}

enum { KIND, VERSION, EARLY, STATE, ITEMS, COUNT, BLOCKS, LOCAL_BLOCKS, PROMPT_TOKENS, ARRIVAL_NS, NUMBERS };
static const uint64_t number_max[NUMBERS] = {PADDING - 1, 255, 7, STATES, 1u << 30, 1u << 30, UINT32_MAX, UINT32_MAX,
                                             UINT32_MAX, UINT64_MAX};

static PyObject *Pusher_hint(Pusher *self, PyObject *const *args, Py_ssize_t nargs)
{
    enum { EPOCH = NUMBERS, FLAGS, DIGESTS, ID, PRIORITY, TRACE, SESSION_DIGEST, ARGUMENTS };
    uint64_t n[NUMBERS];
    _Atomic uint64_t *tail, *sleeping;
    if (nargs != ARGUMENTS)
        return PyErr_Format(PyExc_TypeError, "expected %d arguments, got %zd", ARGUMENTS, nargs);
    for (int i = 0; i < NUMBERS; i++) {
        n[i] = PyLong_AsUnsignedLongLong(args[i]);
        if (n[i] == (uint64_t)-1 && PyErr_Occurred())
            return NULL;
        if (n[i] > number_max[i])
            return PyErr_Format(PyExc_ValueError, "hint out of bounds: argument %d is %llu, max %llu", i, n[i], number_max[i]);
    }
    if (!PyObject_TypeCheck(args[FLAGS], flags_type) || !PyList_Check(args[DIGESTS]) ||
        !PyBytes_Check(args[TRACE]) || !PyBytes_Check(args[SESSION_DIGEST]))
        return PyErr_Format(PyExc_TypeError, "a hint takes Flags, a list of digests, and bytes of a trace and a session");
    Flags *flags = (Flags *)args[FLAGS];
    PyObject *digests = args[DIGESTS];
    Py_ssize_t count = (Py_ssize_t)n[COUNT], wanted = pages_of((Py_ssize_t)n[ITEMS]);
    PyObject *first = PyList_Size(digests) > 0 ? PyList_GetItem(digests, 0) : NULL;
    if (first == NULL || !PyBytes_Check(first) || count < 1 || count > PyList_Size(digests) || wanted > UINT16_MAX ||
        PyBytes_Size(args[TRACE]) != TRACE_BYTES || PyBytes_Size(args[SESSION_DIGEST]) != SESSION_BYTES)
        return PyErr_Format(PyExc_ValueError,
                            "hint out of bounds: digests=%zd count=%zd pages=%zd trace_bytes=%zd session_bytes=%zd",
                            PyList_Size(digests), count, wanted, PyBytes_Size(args[TRACE]),
                            PyBytes_Size(args[SESSION_DIGEST]));
    Py_ssize_t size = PyBytes_Size(first), name_bytes = 0, index = 0;
    if (size < 1 || size > MAX_HASH_BYTES)
        return PyErr_Format(PyExc_ValueError, "digest out of bounds: bytes=%zd max=%d", size, MAX_HASH_BYTES);
    int overflow;
    long long priority = PyLong_AsLongLongAndOverflow(args[PRIORITY], &overflow);
    if (priority == -1 && PyErr_Occurred())
        return NULL;
    if (overflow || priority > INT32_MAX || priority < INT32_MIN)
        priority = overflow > 0 || (!overflow && priority > 0) ? INT32_MAX : INT32_MIN;
    PyObject *held = NULL;
    const char *name = name_of(args[ID], &name_bytes, &held);
    if (name == NULL)
        return NULL;
    PyObject *result = NULL, *lent = PyList_New(wanted);
    Handle *handle = PyObject_New(Handle, handle_type);
    uint64_t length = HINT_BYTES + (uint64_t)name_bytes + 4 * (uint64_t)wanted + (uint64_t)size * (uint64_t)count;
    if (handle != NULL)
        *handle = (Handle){.ob_base = handle->ob_base};
    if (lent == NULL || handle == NULL || ring_words(self, &tail, &sleeping) < 0)
        goto end;
    int64_t generation = 0;
    uint8_t *head, *at, *pages;
    Py_ssize_t offset = PyBytes_AsString(first) - (const char *)first; /* of what each bytes object holds */
    do {
        /* Without room the cost does not depend on the number of digests. */
        int room = length > max_payload(self) ? 0 : has_flag(flags, (Py_ssize_t)n[ITEMS]);
        /* One turn of the GIL from here to the publication: nothing runs Python, so no other thread pushes in between. */
        room = room <= 0 ? room : fits(self, length);
        if (room <= 0) {
            result = room == 0 ? Py_NewRef(Py_None) : NULL;
            goto end;
        }
        head = start_record(self, (uint32_t)length, (uint32_t)n[KIND]), at = head + HINT_BYTES;
        memcpy(at, name, (size_t)name_bytes);
        pages = at + name_bytes;
        at = pages + 4 * wanted;
        for (Py_ssize_t i = 0; i < count; i++) {
            PyObject *digest = PyList_GetItem(digests, i);
            if (digest == NULL || Py_TYPE(digest) != &PyBytes_Type || Py_SIZE(digest) != size) {
                PyErr_Format(PyExc_ValueError, "digests differ: number=%zd expected_bytes=%zd", i, size);
                goto end;
            }
            const char *from = (const char *)digest + offset;
            if (size == USUAL_HASH_BYTES)
                memcpy(at, from, USUAL_HASH_BYTES); /* of a known size: in place */
            else
                memcpy(at, from, (size_t)size);
            at += size;
        }
        /* Last: from here on nothing can fail but for want of memory, and then the flag would never be given back. */
        generation = take(flags, n[STATE], lent, &index);
        if (generation < 0 || (generation == 0 && put_back(flags, index) < 0))
            goto end;
    } while (generation == 0);
    for (Py_ssize_t i = 0; i < wanted; i++)
        pages = put(pages, PyLong_AsUnsignedLongMask(PyList_GetItem(lent, i)), 4);
    head = put(put(head, n[VERSION], 1), n[EARLY], 1);
    head = put(put(put(head, (uint64_t)size, 2), (uint64_t)name_bytes, 2), (uint64_t)wanted, 2);
    head = put(put(put(head, (uint64_t)index, 4), n[BLOCKS], 4), n[LOCAL_BLOCKS], 4);
    head = put(put(head, (uint64_t)priority, 4), n[PROMPT_TOKENS], 4);
    head = put(put(head, (uint64_t)generation, 8), n[ARRIVAL_NS], 8);
    memcpy(head, PyBytes_AsString(args[TRACE]), TRACE_BYTES);
    memcpy(head + TRACE_BYTES, PyBytes_AsString(args[SESSION_DIGEST]), SESSION_BYTES);
    *handle = (Handle){.ob_base = handle->ob_base,
                       .flags = (Flags *)Py_NewRef(flags),
                       .epoch = Py_NewRef(args[EPOCH]),
                       .digests = Py_NewRef(digests),
                       .flag = index,
                       .blocks = (Py_ssize_t)n[BLOCKS],
                       .local_blocks = (Py_ssize_t)n[LOCAL_BLOCKS],
                       .generation = generation};
    if (publish_record(self, tail, sleeping, length) == 0)
        result = Py_NewRef(handle);
end:
    Py_XDECREF(handle);
    Py_XDECREF(lent);
    Py_XDECREF(held);
    return result;
}

static PyMethodDef Pusher_methods[] = {
    {"push", (PyCFunction)(void (*)(void))Pusher_push, METH_FASTCALL, "push(kind, payload=b'') -> bool"},
    {"fits", (PyCFunction)Pusher_fits, METH_O, "fits(length) -> bool: whether such a payload can be pushed now"},
    {"hint", (PyCFunction)(void (*)(void))Pusher_hint, METH_FASTCALL,
     "hint(kind, version, early, state, items, count, blocks, local_blocks, prompt_tokens, arrival_ns, epoch, "
     "flags, digests, request_id, priority, trace, session_digest) -> Handle, or None without a flag or room"},
    {NULL, NULL, 0, NULL},
};

TYPE(Pusher, Py_TPFLAGS_BASETYPE, {Py_tp_new, Pusher_new},
     {Py_tp_doc, "Pusher(ring, words, lines, tail, head, ring_bell): pushes records"});

int add_pusher_type(PyObject *module)
{
    return add_type(module, &Pusher_spec, "Pusher") == NULL ? -1 : 0;
}
