/* Flags and slot tables as the engine reads them, and the flags that it takes: in C, because its thread calls this for each
 * request with cold caches.
 */
#include "_engine.h"

PyTypeObject *flags_type;

PyTypeObject *add_type(PyObject *module, PyType_Spec *spec, const char *name)
{
    PyObject *type = PyType_FromSpec(spec);
    if (type != NULL && PyModule_AddObjectRef(module, name, type) < 0)
        Py_CLEAR(type);
    return (PyTypeObject *)type;
}

void release(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *Flags_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *words, *tables, *free, *pages, *table, *flag_type;
    unsigned long long slot_bound;
    if (!PyArg_ParseTuple(args, "O!O!O!O!OKO!:Flags", words_type, &words, &PyList_Type, &tables, &PyList_Type, &free,
                          &PyList_Type, &pages, &table, &slot_bound, &PyType_Type, &flag_type))
        return NULL;
    Flags *self = (Flags *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    if ((self->view = hold(table, 0, (void **)&self->table, &self->table_bytes)) == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    self->words = (Words *)Py_NewRef(words);
    self->tables = Py_NewRef(tables);
    self->free = Py_NewRef(free);
    self->pages = Py_NewRef(pages);
    self->slot_bound = slot_bound;
    self->flag_type = (PyTypeObject *)Py_NewRef(flag_type);
    return (PyObject *)self;
}

static void Flags_dealloc(Flags *self)
{
    Py_XDECREF(self->view);
    Py_XDECREF(self->words);
    Py_XDECREF(self->tables);
    Py_XDECREF(self->free);
    Py_XDECREF(self->pages);
    Py_XDECREF(self->flag_type);
    release((PyObject *)self);
}

static PyObject *imported(const char *from, const char *name)
{
    PyObject *module = PyImport_ImportModule(from), *found = module == NULL ? NULL : PyObject_GetAttrString(module, name);
    Py_XDECREF(module);
    return found;
}

PyObject *corrupt(const char *format, ...)
{
    PyObject *kind = imported("kvprefetch.shmring.errors", "SegmentCorrupt");
    va_list values;
    va_start(values, format);
    if (kind != NULL)
        PyErr_FormatV(kind, format, values);
    va_end(values);
    Py_XDECREF(kind);
    return NULL;
}

static newfunc new_tuple; /* of the type tuple */

PyObject *flag_of_word(Flags *self, uint64_t word)
{
    PyObject *parts = Py_BuildValue("((Kii))", (unsigned long long)(word >> GENERATION_SHIFT),
                                    (int)(word >> STATE_SHIFT & STATES), (int)(word & MAX_COUNT));
    PyObject *result = parts == NULL ? NULL : new_tuple(self->flag_type, parts, NULL);
    Py_XDECREF(parts);
    return result;
}

/* Returns a word of a flag's line that carries the generation: its blocks, or None where it is of an earlier use. */
static PyObject *blocks_of(Flags *self, PyObject *index_object, Py_ssize_t at, const char *name)
{
    Py_ssize_t index = PyLong_AsSsize_t(index_object), flags = self->words->count / WORDS_PER_LINE;
    if (index == -1 && PyErr_Occurred())
        return NULL;
    if (index < 0 || index >= flags)
        return PyErr_Format(PyExc_IndexError, "flag index=%zd is outside 0..%zd", index, flags - 1);
    _Atomic uint64_t *flag = word_of(self->words, index * WORDS_PER_LINE);
    /* SYNC flag: slot table and found word visible with the count */
    uint64_t word = order_load_acquire(flag + at); /* of the same line, all of which is in bounds */
    if (word >> GENERATION_SHIFT != order_load_acquire(flag) >> GENERATION_SHIFT)
        Py_RETURN_NONE;
    word &= (1u << GENERATION_SHIFT) - 1;
    if (word > MAX_COUNT)
        return corrupt("%s blocks out of bounds: blocks=%llu max=%d", name, (unsigned long long)word, MAX_COUNT);
    return PyLong_FromUnsignedLongLong(word);
}

static PyObject *Flags_found(Flags *self, PyObject *index)
{
    PyObject *blocks = blocks_of(self, index, 1, "found");
    if (blocks != Py_None)
        return blocks;
    Py_DECREF(blocks);
    return PyLong_FromLong(0);
}

static PyObject *Flags_disk(Flags *self, PyObject *index) { return blocks_of(self, index, 2, "disk"); }

static PyObject *array_type; /* array.array */

PyObject *slots_of(Flags *self, Py_ssize_t index, Py_ssize_t start, Py_ssize_t stop)
{
    if (index < 0 || index >= PyList_Size(self->tables))
        return PyErr_Format(PyExc_IndexError, "flag outside the slot table: flag=%zd max=%zd", index,
                            PyList_Size(self->tables) - 1);
    PyObject *pages = PyList_GetItem(self->tables, index); /* borrowed: nothing below runs Python code */
    Py_ssize_t lent = PySequence_Size(pages), most = lent * PAGE_ENTRIES;
    if (lent < 0)
        return NULL;
    PyObject *bytes = NULL, *slots = NULL;
    if (start < 0 || start > stop || stop > most) {
        corrupt("block range outside the slot table: start=%zd stop=%zd max=%zd", start, stop, most);
        goto end;
    }
    if ((bytes = PyBytes_FromStringAndSize(NULL, (stop - start) * 4)) == NULL)
        goto end;
    uint32_t *to = (uint32_t *)PyBytes_AsString(bytes), highest = 0;
    /* SYNC claim: entry and claim cross */
    order_fence();
    while (start < stop) {
        Py_ssize_t at = start % PAGE_ENTRIES, count = PAGE_ENTRIES - at < stop - start ? PAGE_ENTRIES - at : stop - start;
        PyObject *number = PySequence_GetItem(pages, start / PAGE_ENTRIES);
        Py_ssize_t page = number == NULL ? -1 : PyLong_AsSsize_t(number);
        Py_XDECREF(number);
        if (page < 0 || page >= self->table_bytes / (PAGE_ENTRIES * 4)) {
            PyErr_Format(PyExc_IndexError, "page outside the slot tables: page=%zd", page);
            goto end;
        }
        memcpy(to, self->table + (page * PAGE_ENTRIES + at) * 4, (size_t)count * 4);
        for (Py_ssize_t i = 0; i < count; i++)
            highest = to[i] > highest ? to[i] : highest;
        to += count;
        start += count;
    }
    /* SYNC copy: the copy visible with the entry */
    order_fence();
    if (PyBytes_Size(bytes) > 0 && highest >= self->slot_bound)
        corrupt("slot number out of bounds: slot=%u bound=%llu", highest, (unsigned long long)self->slot_bound);
    else
        slots = PyObject_CallFunction(array_type, "sO", "I", bytes);
end:
    Py_XDECREF(bytes);
    return slots;
}

static PyObject *Flags_read_slots(Flags *self, PyObject *args)
{
    Py_ssize_t index, start, stop;
    return PyArg_ParseTuple(args, "nnn", &index, &start, &stop) ? slots_of(self, index, start, stop) : NULL;
}

/* --- flags that the engine takes ------------------------------------------------------------------------------------- */

/* Begins a use of a flag. Returns its generation; 0 unless the flag was FREE; -1 with an exception. */
static int64_t begin(Flags *self, Py_ssize_t index, uint64_t state)
{
    _Atomic uint64_t *flag = written_word(self->words, index * WORDS_PER_LINE);
    if (flag == NULL)
        return -1;
    /* SYNC flag: slot table and found word visible with the count */
    /* SYNC slots: slots read before they are given up */
    uint64_t word = order_load_acquire(flag), generation = (word >> GENERATION_SHIFT) % MAX_GENERATION + 1;
    if ((word >> STATE_SHIFT & STATES) != FREE ||
        order_compare_exchange(flag, word, generation << GENERATION_SHIFT | state << STATE_SHIFT) != word)
        return 0;
    return (int64_t)generation;
}

int has_flag(Flags *self, Py_ssize_t items)
{
    if (PyList_Size(self->free) > 0 && PyList_Size(self->pages) >= pages_of(items))
        return 1;
    PyObject *answer = PyObject_CallMethod((PyObject *)self, "room", "n", items);
    int room = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return room;
}

int64_t take(Flags *self, uint64_t state, PyObject *lent, Py_ssize_t *index)
{
    Py_ssize_t wanted = PyList_Size(lent), left = PyList_Size(self->free), pages = PyList_Size(self->pages);
    *index = -1;
    if (left == 0 || pages < wanted)
        return 0;
    *index = PyLong_AsSsize_t(PyList_GetItem(self->free, left - 1));
    if ((*index == -1 && PyErr_Occurred()) || PyList_SetSlice(self->free, left - 1, left, NULL) < 0)
        return -1;
    int64_t generation = begin(self, *index, state);
    if (generation <= 0)
        return generation;
    for (Py_ssize_t i = 0; i < wanted; i++)
        if (PyList_SetItem(lent, i, Py_NewRef(PyList_GetItem(self->pages, pages - wanted + i))) < 0)
            return -1;
    if (PyList_SetSlice(self->pages, pages - wanted, pages, NULL) < 0 ||
        PyList_SetItem(self->tables, *index, Py_NewRef(lent)) < 0)
        return -1;
    return generation;
}

int put_back(Flags *self, Py_ssize_t index)
{
    PyObject *done = index < 0 ? Py_NewRef(Py_None) : PyObject_CallMethod((PyObject *)self, "give_back", "n", index);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static PyObject *Flags_take(Flags *self, PyObject *args)
{
    Py_ssize_t index = 0, state, items;
    int64_t generation = 0;
    int room;
    if (!PyArg_ParseTuple(args, "nn", &state, &items))
        return NULL;
    if (state < 0 || state > STATES || items < 0)
        return PyErr_Format(PyExc_ValueError, "flag out of bounds: state=%zd items=%zd", state, items);
    PyObject *lent = PyList_New(pages_of(items));
    if (lent == NULL)
        return NULL;
    while ((room = has_flag(self, items)) > 0 && (generation = take(self, (uint64_t)state, lent, &index)) == 0)
        if (put_back(self, index) < 0)
            generation = -1;
    Py_DECREF(lent);
    if (room == 0)
        Py_RETURN_NONE;
    return room < 0 || generation < 0 ? NULL : Py_BuildValue("nL", index, (long long)generation);
}

static PyMethodDef Flags_methods[] = {
    {"__class_getitem__", Py_GenericAlias, METH_O | METH_CLASS, "for type checkers"},
    {"found", (PyCFunction)Flags_found, METH_O, "found(index) -> int"},
    {"disk", (PyCFunction)Flags_disk, METH_O, "disk(index) -> int or None"},
    {"read_slots", (PyCFunction)Flags_read_slots, METH_VARARGS, "read_slots(index, start, stop) -> array('I')"},
    {"take", (PyCFunction)Flags_take, METH_VARARGS,
     "take(state, items) -> (index, generation) of a flag now in `state` with pages for so many items, or None"},
    {NULL, NULL, 0, NULL},
};

TYPE(Flags, Py_TPFLAGS_BASETYPE, {Py_tp_new, Flags_new},
     {Py_tp_doc, "Flags(words, tables, free, pages, table, slot_bound, flag_type): the engine's calls about flag lines and slot "
                 "tables; a subclass has room(items) and give_back(index)"});

int add_flags_type(PyObject *module)
{
    array_type = imported("array", "array");
    new_tuple = (newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new);
    return array_type == NULL || (flags_type = add_type(module, &Flags_spec, "Flags")) == NULL ? -1 : 0;
}
