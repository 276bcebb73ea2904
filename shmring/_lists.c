/* Lists of vLLM as plain numbers: digests of blocks, and block ids. One pass each, as a list may have 65,536 members. */
#include "_engine.h"

/* Finds [start, stop) of a list, from three arguments; with `cut` what of it the list has. -1 with an exception. */
static int range_of(PyObject *const *args, Py_ssize_t *start, Py_ssize_t *stop, int cut)
{
    if (!PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "expected a list");
        return -1;
    }
    *start = PyLong_AsSsize_t(args[1]);
    *stop = PyErr_Occurred() ? -1 : PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred())
        return -1;
    Py_ssize_t length = PyList_Size(args[0]), end = cut && *stop > length ? length : *stop;
    if (*start >= 0 && *start <= *stop && end <= length) {
        *start = *start > end ? end : *start;
        *stop = end;
        return 0;
    }
    PyErr_Format(PyExc_IndexError, "outside the list: start=%zd stop=%zd length=%zd", *start, *stop, length);
    return -1;
}

/* Copies the first 8 bytes of the digests [start, stop) of a list; -1 with an exception. */
static int copy_heads(PyObject *digests, Py_ssize_t start, Py_ssize_t stop, uint64_t *heads)
{
    for (; start < stop; start++) {
        PyObject *digest = PyList_GetItem(digests, start);
        if (Py_TYPE(digest) != &PyBytes_Type || Py_SIZE(digest) < 8) {
            PyErr_Format(PyExc_ValueError, "a digest is bytes, at least 8: number=%zd", start);
            return -1;
        }
        memcpy(heads++, PyBytes_AsString(digest), 8);
    }
    return 0;
}

PyObject *heads(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    Py_ssize_t start, stop;
    if (nargs != 3)
        return PyErr_Format(PyExc_TypeError, "expected 3 arguments, got %zd", nargs);
    if (range_of(args, &start, &stop, 0) < 0)
        return NULL;
    PyObject *result = PyBytes_FromStringAndSize(NULL, (stop - start) * 8);
    if (result != NULL && copy_heads(args[0], start, stop, (uint64_t *)PyBytes_AsString(result)) < 0)
        Py_CLEAR(result);
    return result;
}

PyObject *mark(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    Py_ssize_t start, stop, bytes;
    enum { BATCH = 128 };
    uint64_t *places, keys[BATCH];
    if (nargs != 5)
        return PyErr_Format(PyExc_TypeError, "expected 5 arguments, got %zd", nargs);
    int known = PyObject_IsTrue(args[3]);
    if (known < 0 || range_of(args, &start, &stop, 0) < 0 || PyObject_AsWriteBuffer(args[4], (void **)&places, &bytes) < 0)
        return NULL;
    uint64_t mask = (uint64_t)bytes / 8 - 1;
    if (bytes < 8 || bytes % 8 != 0 || (mask & (mask + 1)) != 0 || (uintptr_t)places % 8 != 0)
        return PyErr_Format(PyExc_ValueError, "places are a power of two of words: bytes=%zd", bytes);
    while (start < stop) {
        Py_ssize_t count = stop - start < BATCH ? stop - start : BATCH;
        if (copy_heads(args[0], start, start + count, keys) < 0)
            return NULL;
        start += count;
        /* Each place lies on a page of its own: all are asked for before the first one is needed. */
        for (Py_ssize_t i = 0; i < count; i++)
            __builtin_prefetch(&places[(keys[i] | 1) & mask], 1);
        for (Py_ssize_t i = 0; i < count; i++) {
            uint64_t key = keys[i] | 1, *place = &places[key & mask];
            if (known)
                *place = key;
            else if (*place == key)
                *place = 0;
        }
    }
    Py_RETURN_NONE;
}

PyObject *numbers(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    Py_ssize_t start, stop;
    if (nargs != 3)
        return PyErr_Format(PyExc_TypeError, "expected 3 arguments, got %zd", nargs);
    if (range_of(args, &start, &stop, 1) < 0)
        return NULL;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (stop - start) * 4), *result = NULL;
    uint32_t *at = bytes == NULL ? NULL : (uint32_t *)PyBytes_AsString(bytes);
    for (; bytes != NULL && start < stop; start++) {
        unsigned long value = PyLong_AsUnsignedLong(PyList_GetItem(args[0], start));
        if (value == (unsigned long)-1 && PyErr_Occurred())
            goto end;
        if (value > UINT32_MAX) {
            PyErr_Format(PyExc_OverflowError, "number out of bounds: value=%lu max=%u", value, UINT32_MAX);
            goto end;
        }
        *at++ = (uint32_t)value;
    }
    result = bytes == NULL ? NULL : PyObject_CallFunction(array_type, "sO", "I", bytes);
end:
    Py_XDECREF(bytes);
    return result;
}
