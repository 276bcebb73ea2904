/* The machine's memory as files, which all its processes see. */
#include "fake.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

int lock_machine(void) {
    char path[512];
    int file = open(path_of(path, "lock"), O_RDWR | O_CLOEXEC);
    if (file < 0 || flock(file, LOCK_EX)) DIE("%s: %s", path, strerror(errno));
    return file;
}

/* Bytes in files DEVICE-KIND-… that a process holds; those that nobody holds any more are removed. */
static size_t held_bytes(int device, const char *kind) {
    char path[512], prefix[64];
    size_t held = 0;
    struct dirent *entry;
    snprintf(prefix, sizeof prefix, "%d-%s", device, kind);
    DIR *folder = opendir(path_of(path, "memory"));
    if (!folder) DIE("%s: %s", path, strerror(errno));
    while ((entry = readdir(folder))) {
        struct stat status;
        if (strncmp(entry->d_name, prefix, strlen(prefix))) continue;
        int file = openat(dirfd(folder), entry->d_name, O_RDWR | O_CLOEXEC);
        if (file < 0) continue;
        if (!flock(file, LOCK_EX | LOCK_NB)) unlinkat(dirfd(folder), entry->d_name, 0);
        else if (!fstat(file, &status)) held += strstr(entry->d_name, "-context-") ? CONTEXT_BYTES : status.st_size;
        close(file);
    }
    closedir(folder);
    return held;
}

bool others_hold(int device, const char *kind) {
    int machine = lock_machine();
    bool found = held_bytes(device, kind) > 0;
    close(machine);
    return found;
}

int take_memory(int device, const char *kind, size_t size, char name[64]) {
    static int number;
    char path[512], part[128];
    int machine = lock_machine(), file = -1;
    snprintf(name, 64, "%d-%s-%d-%d", device, kind, getpid(), __atomic_add_fetch(&number, 1, __ATOMIC_RELAXED));
    if (size <= devices[device].bytes - held_bytes(device, "")) {
        snprintf(part, sizeof part, "memory/%s", name);
        /* For all users: those that look for free room must be able to ask for its lock. */
        file = open(path_of(path, part), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (file < 0 || fchmod(file, 0666) || ftruncate(file, size) || flock(file, LOCK_SH))
            DIE("%s: %s", path, strerror(errno));
    }
    close(machine);
    return file;
}

EXPORT Result cuMemGetInfo_v2(size_t *available, size_t *total) {
    ENTER(INITIALISED | CONTEXT);
    int machine = lock_machine();
    *total = devices[current_device()].bytes;
    *available = *total - held_bytes(current_device(), "");
    close(machine);
    return OK;
}
