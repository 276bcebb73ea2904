/* LD_PRELOAD: CLOCK_REALTIME of this process is ahead by the nanoseconds in the file that SHIFT_FILE names (an int64,
 * read anew each time), as after a step of the clock. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *shift_ns;

__attribute__((constructor)) static void map_shift(void)
{
    const char *name = getenv("SHIFT_FILE");
    int fd = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped != MAP_FAILED)
        shift_ns = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (code == 0 && clock == CLOCK_REALTIME && shift_ns) {
        int64_t ns = now->tv_nsec + *shift_ns % 1000000000;
        now->tv_sec += *shift_ns / 1000000000 + ns / 1000000000;
        now->tv_nsec = ns % 1000000000;
    }
    return code;
}
