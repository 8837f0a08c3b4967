/* Loaded with LD_PRELOAD: file calls below the folder SLOW_FOLDER take SLOW_MILLISECONDS longer each.

   gcc -shared -fPIC -O1 -o slow_store.so slow_store.c -ldl */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static void wait_below(const char *path) {
    const char *folder = getenv("SLOW_FOLDER"), *text = getenv("SLOW_MILLISECONDS");
    if (!path || !folder || !text || strncmp(path, folder, strlen(folder))) return;
    long milliseconds = atol(text);
    struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    nanosleep(&time, NULL);
}

static void wait_for(int descriptor) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length > 0) path[length] = 0, wait_below(path);
}

#define REAL(name, result, ...) ((result (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = va_arg(more, mode_t); \
        va_end(more); \
        wait_below(path); \
        return REAL(name, int, const char *, int, ...)(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

ssize_t write(int descriptor, const void *data, size_t size) {
    wait_for(descriptor);
    return REAL(write, ssize_t, int, const void *, size_t)(descriptor, data, size);
}

ssize_t read(int descriptor, void *data, size_t size) {
    wait_for(descriptor);
    return REAL(read, ssize_t, int, void *, size_t)(descriptor, data, size);
}

int fsync(int descriptor) {
    wait_for(descriptor);
    return REAL(fsync, int, int)(descriptor);
}

int rename(const char *from, const char *to) {
    wait_below(to);
    return REAL(rename, int, const char *, const char *)(from, to);
}
