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
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->view);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* Returns the address of one word, or NULL with IndexError set. */
static _Atomic uint64_t *word_at(Words *self, PyObject *index_object)
{
    Py_ssize_t index = PyLong_AsSsize_t(index_object);
    if (index == -1 && PyErr_Occurred())
        return NULL;
    return word_of(self, index);
}

static int value_of(PyObject *object, uint64_t *value)
{
    *value = PyLong_AsUnsignedLongLong(object);
    return (*value == (uint64_t)-1 && PyErr_Occurred()) ? -1 : 0;
}

static int check_call(Words *self, Py_ssize_t got, Py_ssize_t wanted, int writes)
{
    if (got != wanted) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, got);
        return -1;
    }
    if (writes && !self->writable) {
        PyErr_SetString(PyExc_TypeError, "these words are a read-only view");
        return -1;
    }
    return 0;
}

static PyObject *Words_load_acquire(Words *self, PyObject *index)
{
    _Atomic uint64_t *word = word_at(self, index);
    if (word == NULL)
        return NULL;
    return PyLong_FromUnsignedLongLong(order_load_acquire(word));
}

static PyObject *Words_store_release(Words *self, PyObject *const *args, Py_ssize_t nargs)
{
    uint64_t value;
    if (check_call(self, nargs, 2, 1) < 0)
        return NULL;
    _Atomic uint64_t *word = word_at(self, args[0]);
    if (word == NULL || value_of(args[1], &value) < 0)
        return NULL;
    order_store_release(word, value);
    Py_RETURN_NONE;
}

static PyObject *Words_compare_exchange(Words *self, PyObject *const *args, Py_ssize_t nargs)
{
    uint64_t expected, desired;
    if (check_call(self, nargs, 3, 1) < 0)
        return NULL;
    _Atomic uint64_t *word = word_at(self, args[0]);
    if (word == NULL || value_of(args[1], &expected) < 0 || value_of(args[2], &desired) < 0)
        return NULL;
    return PyLong_FromUnsignedLongLong(order_compare_exchange(word, expected, desired));
}

static PyObject *Words_publish(Words *self, PyObject *const *args, Py_ssize_t nargs)
{
    uint64_t value;
    if (check_call(self, nargs, 3, 1) < 0)
        return NULL;
    _Atomic uint64_t *word = word_at(self, args[0]);
    if (word == NULL || value_of(args[1], &value) < 0)
        return NULL;
    _Atomic uint64_t *look = word_at(self, args[2]);
    if (look == NULL)
        return NULL;
    return PyLong_FromUnsignedLongLong(order_publish(word, value, look));
}

static PyObject *Words_release(Words *self, PyObject *Py_UNUSED(ignored))
{
    self->count = 0;
    Py_CLEAR(self->view);
    Py_RETURN_NONE;
}

static Py_ssize_t Words_length(Words *self) { return self->count; }

static PyMethodDef Words_methods[] = {
    {"load_acquire", (PyCFunction)Words_load_acquire, METH_O, "load_acquire(index) -> int"},
    {"store_release", (PyCFunction)(void (*)(void))Words_store_release, METH_FASTCALL, "store_release(index, value)"},
    {"compare_exchange", (PyCFunction)(void (*)(void))Words_compare_exchange, METH_FASTCALL,
     "compare_exchange(index, expected, desired) -> int: the earlier value; equal to expected after an exchange"},
    {"publish", (PyCFunction)(void (*)(void))Words_publish, METH_FASTCALL,
     "publish(index, value, look) -> int: store (release), sequentially consistent fence, load of the word `look`"},
    {"release", (PyCFunction)Words_release, METH_NOARGS, "release(): release the buffer; every later access raises"},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef Words_members[] = {
    {"writable", T_BOOL, offsetof(Words, writable), READONLY, "False for a read-only view"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot Words_slots[] = {
    {Py_tp_doc, "Words(buffer, writable=True): aligned 64-bit words shared between processes"},
    {Py_tp_new, Words_new},
    {Py_tp_dealloc, Words_dealloc},
    {Py_tp_methods, Words_methods},
    {Py_tp_members, Words_members},
    {Py_sq_length, Words_length},
    {0, NULL},
};

static PyType_Spec Words_spec = {
    .name = "kvprefetch.shmring._atomics.Words",
    .basicsize = sizeof(Words),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = Words_slots,
};

static PyObject *atomics_fence(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    order_fence();
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"fence", atomics_fence, METH_NOARGS, "fence(): a sequentially consistent fence"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_atomics", .m_doc = "Ordered access to words in shared memory.", .m_size = -1,
    .m_methods = module_methods,
};

PyMODINIT_FUNC PyInit__atomics(void)
{
    PyObject *m = PyModule_Create(&module);
    words_type = m == NULL ? NULL : (PyTypeObject *)PyType_FromSpec(&Words_spec); /* for the life of the process */
    if (words_type == NULL || PyModule_AddObjectRef(m, "Words", (PyObject *)words_type) < 0
        || add_flag_types(m) < 0 || add_handle_type(m) < 0 || add_ring_types(m) < 0)
        Py_CLEAR(m);
    return m;
}

#endif /* SHMRING_ORDERS_ONLY */
