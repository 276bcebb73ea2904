/* What _flags.c, _handle.c and _ring.c share: types of the engine's side, which Python subclasses give their checks and slow paths
 * (flags.FlagTable, flags.FlagAllocator, ring.Producer).  The rules and the orders (SYNC) are those of flags.py and ring.py.
 * The other side may write anything into the memory: a word is copied once, checked, and used.
 */
#ifndef KVPREFETCH_ENGINE_H
#define KVPREFETCH_ENGINE_H

#include "_words.h"

#include <string.h>

/* As in layout.py and flags.py. */
enum { PAGE_ENTRIES = 256, WORDS_PER_LINE = 8, STATE_SHIFT = 20, GENERATION_SHIFT = 24 };
enum { STATES = 15, FREE = 0, MAX_COUNT = (1 << 20) - 1 };
#define MAX_GENERATION ((1ull << 40) - 1)

#pragma GCC visibility push(hidden)

typedef struct {
    PyObject_HEAD
    Words *words;     /* the flag lines alone */
    PyObject *tables; /* list: of each flag, the pages lent to it */
    PyObject *free, *pages; /* lists: flags and pages to hand out, the next one last */
    PyObject *view; /* a memoryview of the slot tables */
    uint8_t *table;
    Py_ssize_t table_bytes;
    uint64_t slot_bound;
    PyTypeObject *flag_type; /* a subclass of tuple: generation, state, count */
} Flags;

typedef struct {
    PyObject_HEAD
    Flags *flags;
    PyObject *epoch, *digests;
    Py_ssize_t flag, blocks, local_blocks;
    long long generation, asked_ns, waited_ns, claimed_ns, missing, cost_ns, spared_ns;
    char stopped;
} Handle;

extern PyTypeObject *flags_type, *handle_type;

/* Returns a flag word taken apart, as a flag_type. */
PyObject *flag_of_word(Flags *self, uint64_t word);

/* Returns the entries [start, stop) of a flag's slot table as array("I"), under the engine's claim. */
PyObject *slots_of(Flags *self, Py_ssize_t index, Py_ssize_t start, Py_ssize_t stop);

static inline Py_ssize_t pages_of(Py_ssize_t items) { return items / PAGE_ENTRIES + (items % PAGE_ENTRIES != 0); }

/* Returns whether there are a flag and pages for so many items, as far as is known; -1 with an exception.  It may run Python. */
int has_flag(Flags *self, Py_ssize_t items);

/* Takes a flag, with as many pages as `lent` has places, which it fills.  Returns its generation; -1 with an exception; 0
 * where another thread took what there was (*index is -1), or the flag that it took out is not FREE: for put_back.
 * It runs no Python: with the GIL held since has_flag, it finds what that found.
 */
int64_t take(Flags *self, uint64_t state, PyObject *lent, Py_ssize_t *index);

/* Gives a flag that is not FREE back, to be looked at again later; -1 with an exception. */
int put_back(Flags *self, Py_ssize_t index);

/* Raises SegmentCorrupt. */
PyObject *corrupt(const char *format, ...);

#pragma GCC visibility pop

#endif
