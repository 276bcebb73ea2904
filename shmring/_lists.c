/* Lists of vLLM as plain numbers: digests of blocks, and ids of blocks. One pass each, as a list may have 65,536 members. */
#include "_engine.h"

static PyObject *block_id_name; /* "block_id", interned */

int prepare_lists(void)
{
    block_id_name = PyUnicode_InternFromString("block_id"); /* for the life of the process */
    return block_id_name == NULL ? -1 : 0;
}

/* Finds [start, stop) of a list or tuple, from two numbers; with `cut` what of it there is. -1 with an exception. */
static int range_of(PyObject *list, PyObject *const *numbers, Py_ssize_t *start, Py_ssize_t *stop, int cut)
{
    *start = PyLong_AsSsize_t(numbers[0]);
    *stop = PyErr_Occurred() ? -1 : PyLong_AsSsize_t(numbers[1]);
    if (PyErr_Occurred())
        return -1;
    Py_ssize_t length = PyList_Check(list) ? PyList_Size(list) : PyTuple_Size(list);
    Py_ssize_t end = cut && *stop > length ? length : *stop;
    if (*start >= 0 && *start <= *stop && end <= length) {
        *start = *start > end ? end : *start;
        *stop = end;
        return 0;
    }
    PyErr_Format(PyExc_IndexError, "outside the list: start=%zd stop=%zd length=%zd", *start, *stop, length);
    return -1;
}

/* The same of a list alone, the first of three arguments, and nothing of it is cut. */
static int list_range(PyObject *const *args, Py_ssize_t *start, Py_ssize_t *stop)
{
    if (PyList_Check(args[0]))
        return range_of(args[0], args + 1, start, stop, 0);
    PyErr_SetString(PyExc_TypeError, "expected a list");
    return -1;
}

/* Copies the first 8 bytes of each step-th digest of [start, stop) of a list; -1 with an exception. */
static int copy_heads(PyObject *digests, Py_ssize_t start, Py_ssize_t stop, Py_ssize_t step, uint64_t *heads)
{
    for (; start < stop; start += step) {
        PyObject *digest = PyList_GetItem(digests, start);
        if (Py_TYPE(digest) != &PyBytes_Type || Py_SIZE(digest) < 8) {
            PyErr_Format(PyExc_ValueError, "a digest is bytes, at least 8: number=%zd", start);
            return -1;
        }
        memcpy(heads++, PyBytes_AsString(digest), 8);
    }
    return 0;
}

/* Returns a step from one digest to the next; -1 with an exception. */
static Py_ssize_t step_of(PyObject *number)
{
    Py_ssize_t step = PyLong_AsSsize_t(number);
    if (step < 1 && !PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "a step is at least 1: step=%zd", step);
    return step < 1 ? -1 : step;
}

PyObject *heads(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    Py_ssize_t start, stop, step;
    if (nargs != 4)
        return PyErr_Format(PyExc_TypeError, "expected 4 arguments, got %zd", nargs);
    if (list_range(args, &start, &stop) < 0 || (step = step_of(args[3])) < 0)
        return NULL;
    PyObject *result = PyBytes_FromStringAndSize(NULL, (stop - start + step - 1) / step * 8);
    if (result != NULL && copy_heads(args[0], start, stop, step, (uint64_t *)PyBytes_AsString(result)) < 0)
        Py_CLEAR(result);
    return result;
}

PyObject *mark(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    Py_ssize_t start, stop, step, bytes;
    enum { BATCH = 128 };
    uint64_t *places, keys[BATCH];
    if (nargs != 7)
        return PyErr_Format(PyExc_TypeError, "expected 7 arguments, got %zd", nargs);
    uint64_t mix = PyLong_AsUnsignedLongLong(args[4]);
    int known = PyErr_Occurred() ? -1 : PyObject_IsTrue(args[5]);
    if (known < 0 || list_range(args, &start, &stop) < 0 || (step = step_of(args[3])) < 0 ||
        PyObject_AsWriteBuffer(args[6], (void **)&places, &bytes) < 0)
        return NULL;
    uint64_t mask = (uint64_t)bytes / 8 - 1;
    if (bytes < 8 || bytes % 8 != 0 || (mask & (mask + 1)) != 0 || (uintptr_t)places % 8 != 0)
        return PyErr_Format(PyExc_ValueError, "places are a power of two of words: bytes=%zd", bytes);
    while (start < stop) {
        Py_ssize_t left = (stop - start + step - 1) / step, count = left < BATCH ? left : BATCH;
        if (copy_heads(args[0], start, count == left ? stop : start + count * step, step, keys) < 0)
            return NULL;
        start += count * step;
        for (Py_ssize_t i = 0; i < count; i++)
            keys[i] = (keys[i] | 1) ^ mix;
        /* Each place lies on a page of its own: all are asked for before the first one is needed. */
        for (Py_ssize_t i = 0; i < count; i++)
            __builtin_prefetch(&places[keys[i] & mask], 1);
        for (Py_ssize_t i = 0; i < count; i++) {
            uint64_t key = keys[i], *place = &places[key & mask];
            if (known)
                *place = key;
            else if (*place == key)
                *place = 0;
        }
    }
    Py_RETURN_NONE;
}

/* Returns the descriptor of the slot that every object of this type keeps its block_id in; NULL, without an exception,
 * where asking the object itself may give something else.  *get reads it as vLLM's own objects do, without a look-up of
 * the name. */
static PyObject *slot_of(PyTypeObject *type, descrgetfunc *get)
{
    PyObject *slot = NULL;
    if (PyType_GetSlot(type, Py_tp_getattro) == (void *)PyObject_GenericGetAttr)
        slot = PyObject_GetAttr((PyObject *)type, block_id_name);
    if (slot != NULL && Py_TYPE(slot) == &PyMemberDescr_Type) {
        *get = (descrgetfunc)PyType_GetSlot(&PyMemberDescr_Type, Py_tp_descr_get);
        return slot;
    }
    PyErr_Clear();
    Py_XDECREF(slot);
    return NULL;
}

/* Returns the id of a block as a new reference; NULL with an exception.  `slot` is that of `type`, or NULL. */
static PyObject *id_of(PyObject *block, PyTypeObject *type, PyObject *slot, descrgetfunc get)
{
    if (slot != NULL && Py_TYPE(block) == type)
        return get(slot, block, (PyObject *)type);
    return PyObject_GetAttr(block, block_id_name);
}

/* Copies the ids of the blocks [start, stop); -1 with an exception.  A block's own code may run meanwhile and change the
 * list: each block is asked for by its number, which is checked, and is held until its id is read. */
static int copy_ids(PyObject *blocks, Py_ssize_t start, Py_ssize_t stop, uint32_t *ids)
{
    PyObject *(*item)(PyObject *, Py_ssize_t) = PyList_Check(blocks) ? PyList_GetItem : PyTuple_GetItem;
    PyTypeObject *type = NULL;
    PyObject *slot = NULL;
    descrgetfunc get = NULL;
    int result = -1;
    for (; start < stop; start++) {
        PyObject *block = item(blocks, start);
        if (block == NULL)
            goto end;
        Py_INCREF(block);
        if (type == NULL) {
            type = (PyTypeObject *)Py_NewRef(Py_TYPE(block));
            slot = slot_of(type, &get);
        }
        PyObject *id = id_of(block, type, slot, get);
        Py_DECREF(block);
        if (id == NULL)
            goto end;
        unsigned long value = PyLong_AsUnsignedLong(id);
        Py_DECREF(id);
        if (value == (unsigned long)-1 && PyErr_Occurred())
            goto end;
        if (value > UINT32_MAX) {
            PyErr_Format(PyExc_OverflowError, "block id out of bounds: value=%lu max=%u", value, UINT32_MAX);
            goto end;
        }
        *ids++ = (uint32_t)value;
    }
    result = 0;
end:
    Py_XDECREF(slot);
    Py_XDECREF(type);
    return result;
}

PyObject *block_ids(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    Py_ssize_t start, stop;
    if (nargs != 3)
        return PyErr_Format(PyExc_TypeError, "expected 3 arguments, got %zd", nargs);
    PyObject *blocks = PyList_Check(args[0]) || PyTuple_Check(args[0]) ? Py_NewRef(args[0]) : PySequence_Tuple(args[0]);
    if (blocks == NULL)
        return NULL;
    PyObject *bytes = NULL, *result = NULL;
    if (range_of(blocks, args + 1, &start, &stop, 1) == 0)
        bytes = PyBytes_FromStringAndSize(NULL, (stop - start) * 4);
    if (bytes != NULL && copy_ids(blocks, start, stop, (uint32_t *)PyBytes_AsString(bytes)) == 0)
        result = PyObject_CallFunction(array_type, "sO", "I", bytes);
    Py_XDECREF(bytes);
    Py_DECREF(blocks);
    return result;
}
