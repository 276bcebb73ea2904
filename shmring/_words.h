/* The orders of accesses to shared memory, and the words that they apply to; _atomics.c says which order is whose. */
#ifndef KVPREFETCH_WORDS_H
#define KVPREFETCH_WORDS_H

#include <stdatomic.h>
#include <stdint.h>

_Static_assert(sizeof(_Atomic uint64_t) == 8, "64-bit atomics must be plain words");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "64-bit atomics must be lock-free to work between processes");

/* With SHMRING_ORDERS_ONLY this file needs no Python headers and exports only these five functions, for a test with a
 * cross compiler. */
#ifdef SHMRING_ORDERS_ONLY
#define ORDER
#else
#define ORDER static inline
#endif

ORDER uint64_t order_load_acquire(_Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_acquire);
}

ORDER void order_store_release(_Atomic uint64_t *word, uint64_t value)
{
    atomic_store_explicit(word, value, memory_order_release);
}

/* Returns the earlier value; it equals `expected` when `desired` was stored. */
ORDER uint64_t order_compare_exchange(_Atomic uint64_t *word, uint64_t expected, uint64_t desired)
{
    atomic_compare_exchange_strong_explicit(word, &expected, desired, memory_order_seq_cst, memory_order_seq_cst);
    return expected;
}

ORDER uint64_t order_publish(_Atomic uint64_t *word, uint64_t value, _Atomic uint64_t *look)
{
    atomic_store_explicit(word, value, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    return atomic_load_explicit(look, memory_order_relaxed);
}

ORDER void order_fence(void)
{
    atomic_thread_fence(memory_order_seq_cst);
}

#ifndef SHMRING_ORDERS_ONLY

/* One extension serves Python 3.10 and all later ones (docs/adr/0150).  Python 3.10's limited API has no Py_buffer: a
 * memoryview holds the buffer instead, and two old functions give its address.  Newer headers leave them out, but the
 * stable ABI keeps them. */
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
PyAPI_FUNC(int) PyObject_AsReadBuffer(PyObject *, const void **, Py_ssize_t *);
PyAPI_FUNC(int) PyObject_AsWriteBuffer(PyObject *, void **, Py_ssize_t *);

typedef struct {
    PyObject_HEAD
    PyObject *view; /* a memoryview */
    void *words;
    Py_ssize_t count; /* words */
    char writable;
} Words;

#pragma GCC visibility push(hidden) /* no other library of the process may stand in for these */

extern PyTypeObject *words_type;

/* Holds a buffer by a memoryview, which it returns, and finds its address and size; NULL with an exception set. */
static inline PyObject *hold(PyObject *source, int writable, void **address, Py_ssize_t *size)
{
    PyObject *view = PyMemoryView_FromObject(source);
    if (view != NULL && (writable ? PyObject_AsWriteBuffer(view, address, size)
                                  : PyObject_AsReadBuffer(view, (const void **)address, size)) < 0)
        Py_CLEAR(view);
    return view;
}

/* Returns the address of one word, or NULL with IndexError set. */
static inline _Atomic uint64_t *word_of(Words *self, Py_ssize_t index)
{
    if (index < 0 || index >= self->count) {
        PyErr_Format(PyExc_IndexError, "word index=%zd is outside 0..%zd", index, self->count - 1);
        return NULL;
    }
    return (_Atomic uint64_t *)self->words + index;
}

/* As word_of, of a word to write; with TypeError set where these may only be read. */
static inline _Atomic uint64_t *written_word(Words *self, Py_ssize_t index)
{
    if (!self->writable)
        return (void *)PyErr_Format(PyExc_TypeError, "these words are a read-only view");
    return word_of(self, index);
}

/* The specification of a type, whose structure, dealloc and methods have its name; with one more flag and more slots. */
#define TYPE(type, flag, ...) \
    static PyType_Spec type##_spec = { \
        .name = "kvprefetch.shmring._atomics." #type, \
        .basicsize = sizeof(type), \
        .flags = Py_TPFLAGS_DEFAULT | flag, \
        .slots = (PyType_Slot[]){{Py_tp_dealloc, type##_dealloc}, {Py_tp_methods, type##_methods}, __VA_ARGS__, {0, NULL}}, \
    }

/* Makes a type, for the life of the process; NULL with an exception set. */
PyTypeObject *add_type(PyObject *module, PyType_Spec *spec, const char *name);

/* Frees an object of such a type, or of a Python subclass. */
void release(PyObject *self);

/* The module's function `copy`, of _copy.c. */
PyObject *copy_segments(PyObject *module, PyObject *args);
PyObject *has_repeats(PyObject *module, PyObject *args);

/* Add the types of _flags.c, _handle.c and _ring.c, in this order; -1 with an exception set. */
int add_flags_type(PyObject *module);
int add_handle_type(PyObject *module);
int add_pusher_type(PyObject *module);

#pragma GCC visibility pop

#endif /* SHMRING_ORDERS_ONLY */
#endif
