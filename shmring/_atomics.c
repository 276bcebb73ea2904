/* The only place, with _words.h, _flags.c, _handle.c and _ring.c, that orders accesses to shared memory.
 *
 * Words(buffer) views a buffer as aligned 64-bit words.  Each method has one C11 order:
 *
 *   load_acquire(index)                      ldar                    / mov
 *   store_release(index, value)              stlr                    / mov
 *   compare_exchange(index, expected, new)   ldaxr+stlxr or casal    / lock cmpxchg   (sequentially consistent)
 *   publish(index, value, look)              stlr; dmb ish; ldr      / mov; mfence; mov
 *   fence()                                  dmb ish                 / mfence or a locked instruction
 *
 * publish is one half of the wake-up handshake: store (release), fence (sequentially consistent), load (relaxed, because
 * the fence orders it and only its value is used).  tests/shmring/test_aarch64.py checks these instructions.
 *
 * Python does not order memoryview accesses, and struct.pack_into may expose a transient zero.  So neither ever touches
 * a word that two processes share.
 */
#include "_words.h"

#ifndef SHMRING_ORDERS_ONLY

PyTypeObject *words_type;

static PyObject *Words_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"buffer", "writable", NULL};
    PyObject *source;
    int writable = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|p:Words", names, &source, &writable))
        return NULL;
    Words *self = (Words *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    Py_ssize_t size;
    if ((self->view = hold(source, writable, &self->words, &size)) == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    if ((uintptr_t)self->words % 8 != 0) {
        PyErr_SetString(PyExc_ValueError, "buffer must start on an 8-byte boundary");
        Py_DECREF(self);
        return NULL;
    }
    self->count = size / 8;
    self->writable = (char)writable;
    return (PyObject *)self;
}

static void Words_dealloc(Words *self)
{
    Py_XDECREF(self->view);
    release((PyObject *)self);
}

/* For PyArg_ParseTuple: a value of all 64 bits. */
static int value_of(PyObject *object, void *value)
{
    *(uint64_t *)value = PyLong_AsUnsignedLongLong(object);
    return !(*(uint64_t *)value == (uint64_t)-1 && PyErr_Occurred());
}

static PyObject *Words_load_acquire(Words *self, PyObject *index_object)
{
    Py_ssize_t index = PyLong_AsSsize_t(index_object);
    _Atomic uint64_t *word = index == -1 && PyErr_Occurred() ? NULL : word_of(self, index);
    return word == NULL ? NULL : PyLong_FromUnsignedLongLong(order_load_acquire(word));
}

static PyObject *Words_store_release(Words *self, PyObject *args)
{
    Py_ssize_t index;
    uint64_t value;
    _Atomic uint64_t *word;
    if (!PyArg_ParseTuple(args, "nO&", &index, value_of, &value) || (word = written_word(self, index)) == NULL)
        return NULL;
    order_store_release(word, value);
    Py_RETURN_NONE;
}

static PyObject *Words_compare_exchange(Words *self, PyObject *args)
{
    Py_ssize_t index;
    uint64_t expected, desired;
    _Atomic uint64_t *word;
    if (!PyArg_ParseTuple(args, "nO&O&", &index, value_of, &expected, value_of, &desired) ||
        (word = written_word(self, index)) == NULL)
        return NULL;
    return PyLong_FromUnsignedLongLong(order_compare_exchange(word, expected, desired));
}

static PyObject *Words_publish(Words *self, PyObject *args)
{
    Py_ssize_t index, look_at;
    uint64_t value;
    _Atomic uint64_t *word, *look;
    if (!PyArg_ParseTuple(args, "nO&n", &index, value_of, &value, &look_at) ||
        (word = written_word(self, index)) == NULL || (look = word_of(self, look_at)) == NULL)
        return NULL;
    return PyLong_FromUnsignedLongLong(order_publish(word, value, look));
}

/* What one side concludes of the other: liveness.PeerStatus, by the states of liveness.PeerState. */
static PyObject *Words_peer(Words *self, PyObject *args)
{
    enum { STARTING, ALIVE, HUNG, GONE };
    enum { IS_STARTING, IS_ACTIVE };
    Py_ssize_t index[3];
    uint64_t limit, now;
    _Atomic uint64_t *word[3];
    if (!PyArg_ParseTuple(args, "nnnO&O&", &index[0], &index[1], &index[2], value_of, &limit, value_of, &now))
        return NULL;
    for (int i = 0; i < 3; i++)
        if ((word[i] = word_of(self, index[i])) == NULL)
            return NULL;
    /* SYNC gone: the watcher's earlier stores visible with the word */
    if (order_load_acquire(word[0]) != 0)
        return PyLong_FromLong(GONE);
    /* SYNC state: earlier stores visible with the state */
    uint64_t state = order_load_acquire(word[1]);
    if (state != IS_ACTIVE)
        return PyLong_FromLong(state == IS_STARTING ? STARTING : GONE);
    /* SYNC beat: read as it is, orders nothing */
    /* Either way: a beat from the future must not read as alive for ever. */
    uint64_t beat = order_load_acquire(word[2]), away = now > beat ? now - beat : beat - now;
    return PyLong_FromLong(away > limit ? HUNG : ALIVE);
}

static PyMethodDef Words_methods[] = {
    {"load_acquire", (PyCFunction)Words_load_acquire, METH_O, "load_acquire(index) -> int"},
    {"store_release", (PyCFunction)Words_store_release, METH_VARARGS, "store_release(index, value)"},
    {"compare_exchange", (PyCFunction)Words_compare_exchange, METH_VARARGS,
     "compare_exchange(index, expected, desired) -> int: the earlier value; equal to expected after an exchange"},
    {"publish", (PyCFunction)Words_publish, METH_VARARGS,
     "publish(index, value, look) -> int: store (release), sequentially consistent fence, load of the word `look`"},
    {"peer", (PyCFunction)Words_peer, METH_VARARGS,
     "peer(gone, state, beat, limit_ns, now_ns) -> int: a PeerStatus, by the words of these numbers"},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef Words_members[] = {
    {"writable", T_BOOL, offsetof(Words, writable), READONLY, "False for a read-only view"},
    {NULL, 0, 0, 0, NULL},
};

TYPE(Words, Py_TPFLAGS_IMMUTABLETYPE, {Py_tp_new, Words_new}, {Py_tp_members, Words_members},
     {Py_tp_doc, "Words(buffer, writable=True): aligned 64-bit words shared between processes"});

static PyObject *atomics_fence(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    order_fence();
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"fence", atomics_fence, METH_NOARGS, "fence(): a sequentially consistent fence"},
    {"repeats", has_repeats, METH_VARARGS,
     "repeats(digests, size) -> bool: whether one of the digests, of so many bytes each and joined, occurs twice"},
    {"copy", copy_segments, METH_VARARGS,
     "copy(targets, sources, length): so many bytes from each source to its target; both are arrays of addresses"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_atomics", .m_doc = "Ordered access to words in shared memory.", .m_size = -1,
    .m_methods = module_methods,
};

PyMODINIT_FUNC PyInit__atomics(void)
{
    PyObject *m = PyModule_Create(&module);
    if (m != NULL && ((words_type = add_type(m, &Words_spec, "Words")) == NULL || add_flags_type(m) < 0
                      || add_handle_type(m) < 0 || add_pusher_type(m) < 0))
        Py_CLEAR(m);
    return m;
}

#endif /* SHMRING_ORDERS_ONLY */
