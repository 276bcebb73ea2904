/* A flag that the engine holds, with its hint: what the scheduler's questions read and exchange, each in one call. */
#define _POSIX_C_SOURCE 200809L /* the clock, and a sleep */
#include "_engine.h"

#include <time.h>

enum { ADOPTED = 3 }; /* as in flags.py */
/* Of a flag that this engine holds, as in wire/records.py. */
enum { HINTED = 1, READY = 2, CLAIMED = 3, EXPIRED = 6 };

PyTypeObject *handle_type;

static void Handle_dealloc(Handle *self)
{
    Py_XDECREF(self->flags);
    Py_XDECREF(self->epoch);
    Py_XDECREF(self->digests);
    release((PyObject *)self);
}

static PyMemberDef Handle_members[] = {
    {"epoch", T_OBJECT_EX, offsetof(Handle, epoch), READONLY, NULL},
    {"digests", T_OBJECT_EX, offsetof(Handle, digests), READONLY, NULL},
    {"flag", T_PYSSIZET, offsetof(Handle, flag), READONLY, NULL},
    {"blocks", T_PYSSIZET, offsetof(Handle, blocks), READONLY, NULL},
    {"local_blocks", T_PYSSIZET, offsetof(Handle, local_blocks), READONLY, NULL},
    {"generation", T_LONGLONG, offsetof(Handle, generation), READONLY, NULL},
    {"asked_ns", T_LONGLONG, offsetof(Handle, asked_ns), 0, NULL},
    {"waited_ns", T_LONGLONG, offsetof(Handle, waited_ns), 0, NULL},
    {"claimed_ns", T_LONGLONG, offsetof(Handle, claimed_ns), 0, NULL},
    {"missing", T_LONGLONG, offsetof(Handle, missing), 0, NULL},
    {"cost_ns", T_LONGLONG, offsetof(Handle, cost_ns), 0, NULL},
    {"spared_ns", T_LONGLONG, offsetof(Handle, spared_ns), 0, NULL},
    {"stopped", T_BOOL, offsetof(Handle, stopped), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyObject *Handle_look(Handle *self, PyObject *Py_UNUSED(ignored))
{
    _Atomic uint64_t *flag = word_of(self->flags->words, self->flag * WORDS_PER_LINE);
    if (flag == NULL)
        return NULL;
    /* SYNC flag: slot table and found word visible with the count */
    /* SYNC slots: slots read before they are given up */
    uint64_t word = order_load_acquire(flag);
    uint64_t generation = word >> GENERATION_SHIFT, state = word >> STATE_SHIFT & STATES, count = word & MAX_COUNT;
    int mine = state == HINTED || state == READY || state == CLAIMED || state == EXPIRED;
    if (!mine || generation != (uint64_t)self->generation || count > (uint64_t)self->blocks)
        return corrupt("flag cannot be so: flag=%zd state=%llu count=%llu blocks=%zd generation=%llu expected=%lld",
                       self->flag, (unsigned long long)state, (unsigned long long)count, self->blocks,
                       (unsigned long long)generation, self->generation);
    return flag_of_word(self->flags, word);
}

static PyObject *Handle_wait(Handle *self, PyObject *until_ns)
{
    enum { PAUSE_NS = 1000000, SECOND_NS = 1000000000 };
    long long until = PyLong_AsLongLong(until_ns), left;
    _Atomic uint64_t *flag = until == -1 && PyErr_Occurred() ? NULL : word_of(self->flags->words, self->flag * WORDS_PER_LINE);
    if (flag == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (;;) {
        struct timespec now;
        /* SYNC flag: slot table and found word visible with the count */
        if ((order_load_acquire(flag) >> STATE_SHIFT & STATES) != HINTED || clock_gettime(CLOCK_MONOTONIC, &now) != 0)
            break;
        if ((left = until - ((long long)now.tv_sec * SECOND_NS + now.tv_nsec)) <= 0)
            break;
        nanosleep(&(struct timespec){.tv_nsec = left < PAUSE_NS ? left : PAUSE_NS}, NULL);
    }
    Py_END_ALLOW_THREADS
    return Handle_look(self, NULL);
}

static PyObject *Handle_claim(Handle *self, PyObject *const *args, Py_ssize_t nargs)
{
    enum { STATE, COUNT, TAKEN, START, STOP, NOW_NS, ARGUMENTS };
    long long n[ARGUMENTS];
    if (nargs != ARGUMENTS)
        return PyErr_Format(PyExc_TypeError, "expected %d arguments, got %zd", ARGUMENTS, nargs);
    for (int i = 0; i < ARGUMENTS; i++)
        if ((n[i] = PyLong_AsLongLong(args[i])) == -1 && PyErr_Occurred())
            return NULL;
    if ((n[STATE] != HINTED && n[STATE] != READY) || n[COUNT] < 0 || n[COUNT] > MAX_COUNT || n[TAKEN] < 0 ||
        n[TAKEN] > n[COUNT])
        return PyErr_Format(PyExc_ValueError, "claim out of bounds: state=%lld count=%lld taken=%lld", n[STATE], n[COUNT],
                            n[TAKEN]);
    _Atomic uint64_t *flag = written_word(self->flags->words, self->flag * WORDS_PER_LINE);
    if (flag == NULL)
        return NULL;
    uint64_t use = (uint64_t)self->generation << GENERATION_SHIFT;
    uint64_t expected = use | (uint64_t)n[STATE] << STATE_SHIFT | (uint64_t)n[COUNT];
    /* SYNC flag: slot table and found word visible with the count */
    if (order_compare_exchange(flag, expected, use | (uint64_t)CLAIMED << STATE_SHIFT | (uint64_t)n[TAKEN]) != expected)
        Py_RETURN_NONE;
    self->claimed_ns = n[NOW_NS];
    return slots_of(self->flags, self->flag, (Py_ssize_t)n[START], (Py_ssize_t)n[STOP]);
}

static PyObject *Handle_adopt(Handle *self, PyObject *now_ns)
{
    uint64_t now = PyLong_AsUnsignedLongLong(now_ns);
    _Atomic uint64_t *word = now == (uint64_t)-1 && PyErr_Occurred()
                                 ? NULL
                                 : written_word(self->flags->words, self->flag * WORDS_PER_LINE + ADOPTED);
    if (word == NULL)
        return NULL;
    /* SYNC adopted: read as it is, orders nothing */
    order_store_release(word, now);
    Py_RETURN_NONE;
}

static PyMethodDef Handle_methods[] = {
    {"__class_getitem__", Py_GenericAlias, METH_O | METH_CLASS, "for type checkers"},
    {"look", (PyCFunction)Handle_look, METH_NOARGS, "look() -> flag_type: the flag word, checked"},
    {"wait", (PyCFunction)Handle_wait, METH_O,
     "wait(until_ns) -> flag_type: as look, once the flag is HINTED no more, or it is that late; lets go of the GIL"},
    {"adopt", (PyCFunction)Handle_adopt, METH_O, "adopt(now_ns): the scheduler has the request of this early hint"},
    {"claim", (PyCFunction)(void (*)(void))Handle_claim, METH_FASTCALL,
     "claim(state, count, taken, start, stop, now_ns) -> array('I') of slots, or None"},
    {NULL, NULL, 0, NULL},
};

TYPE(Handle, Py_TPFLAGS_DISALLOW_INSTANTIATION, {Py_tp_members, Handle_members},
     {Py_tp_doc, "A flag that the engine holds, with its hint: made by Pusher.hint"});

int add_handle_type(PyObject *module)
{
    return (handle_type = add_type(module, &Handle_spec, "Handle")) == NULL ? -1 : 0;
}
