/* Registered host memory. */
#include "fake.h"

#include <sys/mman.h>

struct Registration {
    Address at;
    size_t size;
    struct Context *context;
    struct Registration *next;
};
static struct Registration *registrations;

enum Place host_place_of(Address at, size_t size) {
    for (struct Registration *one = registrations; one; one = one->next) {
        if (one->at <= at && at + size <= one->at + one->size) return REGISTERED;
        if (at < one->at + one->size && one->at < at + size) return NOWHERE; /* over two registrations, or the end */
    }
    return PAGEABLE;
}

static bool is_mapped(Address at, size_t size) {
    unsigned char there;
    for (Address page = at; page < at + size; page += sysconf(_SC_PAGESIZE))
        if (mincore((void *)page, 1, &there)) return false;
    return true;
}

EXPORT Result cuMemHostRegister_v2(void *start, size_t size, unsigned flags) {
    ENTER(INITIALISED | CONTEXT | NOT_CAPTURING);
    Address at = (Address)start;
    long page = sysconf(_SC_PAGESIZE);
    if (!size || flags & ~15u || !is_mapped(at / page * page, size)) return INVALID_VALUE;
    if (at % page || size % page) DIE("a part of a page is registered: address=%#lx bytes=%zu", at, size);
    pthread_rwlock_wrlock(&mappings);
    bool again = false;
    for (struct Registration *one = registrations; one; one = one->next)
        again |= at < one->at + one->size && one->at < at + size;
    if (!again) {
        struct Registration *one = calloc(1, sizeof *one);
        *one = (struct Registration){at, size, current_context(), registrations};
        registrations = one;
        count_resource(one->context, 1);
    }
    pthread_rwlock_unlock(&mappings);
    return again ? ALREADY_REGISTERED : OK;
}

EXPORT Result cuMemHostUnregister(void *start) {
    ENTER(INITIALISED | CONTEXT | NOT_CAPTURING);
    pthread_rwlock_wrlock(&mappings);
    struct Registration **link = &registrations;
    while (*link && (*link)->at != (Address)start) link = &(*link)->next;
    struct Registration *one = *link;
    if (one) *link = one->next;
    pthread_rwlock_unlock(&mappings);
    if (!one) return NOT_REGISTERED;
    assert_unused("host memory is unregistered", one->at, one->size);
    if (!is_mapped(one->at, one->size)) DIE("host memory was unmapped while it was registered: address=%#lx", one->at);
    count_resource(one->context, -1);
    free(one);
    return OK;
}
