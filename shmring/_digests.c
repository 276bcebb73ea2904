/* Whether a digest occurs twice among many: the daemon asks that of each hint, whose digests an engine may choose.
 *
 * So the hash has a random key.  A million digests of 32 bytes take some 70 ms, beside other threads.
 */
#include "_words.h"

#include <string.h>
#include <sys/random.h>

static uint64_t keys[2];

static uint64_t fold(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t hash_of(const uint8_t *digest, Py_ssize_t size)
{
    uint64_t hash = keys[0];
    for (Py_ssize_t at = 0; at < size; at += 8) {
        uint64_t word = 0;
        memcpy(&word, digest + at, (size_t)(size - at < 8 ? size - at : 8));
        hash = fold(word ^ keys[1], hash | 1);
    }
    return fold(hash ^ keys[0], keys[1] | 1);
}

/* Enters `count` digests in a table of `mask` + 1 zeros, half a hash and a number from 1 on for each; returns whether
 * one was there. */
static int repeated(const uint8_t *digests, Py_ssize_t size, Py_ssize_t count, uint64_t *table, uint64_t mask)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        const uint8_t *digest = digests + i * size;
        uint64_t hash = hash_of(digest, size), at = hash & mask, half = hash >> 32 << 32;
        for (; table[at] != 0; at = (at + 1) & mask)
            if ((table[at] ^ half) >> 32 == 0 &&
                memcmp(digests + (Py_ssize_t)((uint32_t)table[at] - 1) * size, digest, (size_t)size) == 0)
                return 1;
        table[at] = half | (uint64_t)(i + 1);
    }
    return 0;
}

PyObject *has_repeats(PyObject *Py_UNUSED(module), PyObject *args)
{
    const uint8_t *digests;
    Py_ssize_t bytes, size;
    if (!PyArg_ParseTuple(args, "y#n", (const char **)&digests, &bytes, &size))
        return NULL;
    if (size < 1 || bytes / size > 1 << 30)
        return PyErr_Format(PyExc_ValueError, "digests out of bounds: bytes=%zd size=%zd", bytes, size);
    if (keys[0] == 0 && getrandom(keys, sizeof keys, 0) != (ssize_t)sizeof keys)
        return PyErr_SetFromErrno(PyExc_OSError);
    uint64_t places = 16;
    while (places < 2 * (uint64_t)(bytes / size))
        places *= 2;
    uint64_t *table = PyMem_Calloc(places, sizeof *table);
    if (table == NULL)
        return PyErr_NoMemory();
    int found;
    Py_BEGIN_ALLOW_THREADS
    found = repeated(digests, size, bytes / size, table, places - 1);
    Py_END_ALLOW_THREADS
    PyMem_Free(table);
    return PyBool_FromLong(found);
}
