/* Preloaded into a process: counts the calls by which it changes files below one folder, and at call number N ends it, signals it
 * or lets calls fail as on a full or read-only disk. Idle until faults_arm() is called, and in every process that is started with
 * exec, as what is armed is kept in memory alone.
 *
 * cc -O1 -shared -fPIC -o faults.so faults.c -ldl
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { IDLE, COUNT, KILL, TEAR, SIGNAL, FULL, READ_ONLY };
enum { GROWS, CHANGES }; /* whether a call needs room on the disk */

static int what, with, log_to = -1;
static long at, seen;
static char root[PATH_MAX];

/* folder: which calls count; kind: one of the above; number: of the call, from 1; value: the signal of SIGNAL. The calls of
 * COUNT are listed in the file `log`, one a line. */
void faults_arm(const char *folder, int kind, long number, int value, const char *log) {
    snprintf(root, sizeof root, "%s", folder);
    at = number, seen = 0, with = value;
    if (log) log_to = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    what = kind;
}

long faults_seen(void) { return seen; }

static int below(const char *path) {
    size_t length = strlen(root);
    return !strncmp(path, root, length) && (path[length] == '/' || path[length] == 0);
}

/* The place of `name` as the call means it: relative to the folder `at`, or of the descriptor itself. */
static int place(char *to, int folder, const char *name) {
    char link[64];
    ssize_t length = 0;
    if (name && name[0] == '/') {
        snprintf(to, PATH_MAX, "%s", name);
        return 1;
    }
    if (folder == AT_FDCWD) {
        if (!getcwd(to, PATH_MAX)) return 0;
        length = strlen(to);
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        length = readlink(link, to, PATH_MAX - 1);
        if (length < 0) return 0;
        to[length] = 0;
    }
    if (name && length < PATH_MAX - 2) snprintf(to + length, PATH_MAX - length, "/%s", name);
    return 1;
}

/* 0: go on; -1: write half of it and end; else the error that the call fails with. */
static int strike(const char *call, int folder, const char *name, int needs) {
    char path[PATH_MAX];
    int before = errno;
    if (what == IDLE || !place(path, folder, name) || !below(path)) {
        errno = before;
        return 0;
    }
    long number = __atomic_add_fetch(&seen, 1, __ATOMIC_SEQ_CST);
    if (what == COUNT && log_to >= 0) dprintf(log_to, "%s %s\n", call, path + strlen(root));
    errno = before;
    if (what == FULL && number >= at) return needs == GROWS ? ENOSPC : 0;
    if (what == READ_ONLY && number >= at) return EROFS;
    if (number != at) return 0;
    if (what == TEAR && strstr(call, "write")) return -1;
    if (what == KILL || what == TEAR) kill(getpid(), SIGKILL);
    if (what == SIGNAL) kill(getpid(), with);
    return 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define REFUSED(call, folder, name, needs) \
    do { \
        int error = strike(call, folder, name, needs); \
        if (error > 0) { \
            errno = error; \
            return -1; \
        } \
    } while (0)

#define WRITES (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        if (flags & WRITES) REFUSED("open", AT_FDCWD, path, flags & O_CREAT ? GROWS : CHANGES); \
        return REAL(name)(path, flags, mode); \
    }
#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        if (flags & WRITES) REFUSED("open", folder, path, flags & O_CREAT ? GROWS : CHANGES); \
        return REAL(name)(folder, path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int file, const void *data, size_t size) {
    int error = strike("write", file, NULL, GROWS);
    if (error > 0) {
        errno = error;
        return -1;
    }
    if (error < 0) {
        REAL(write)(file, data, size / 2);
        kill(getpid(), SIGKILL);
    }
    return REAL(write)(file, data, size);
}

#define PWRITE(name, offset_type) \
    ssize_t name(int file, const void *data, size_t size, offset_type offset) { \
        REFUSED("pwrite", file, NULL, GROWS); \
        return REAL(name)(file, data, size, offset); \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

ssize_t writev(int file, const struct iovec *parts, int count) {
    REFUSED("writev", file, NULL, GROWS);
    return REAL(writev)(file, parts, count);
}

#define SENDFILE(name, offset_type) \
    ssize_t name(int to, int from, offset_type *offset, size_t count); \
    ssize_t name(int to, int from, offset_type *offset, size_t count) { \
        REFUSED("sendfile", to, NULL, GROWS); \
        return REAL(name)(to, from, offset, count); \
    }
SENDFILE(sendfile, off_t)
SENDFILE(sendfile64, off64_t)

ssize_t copy_file_range(int from, off64_t *start, int to, off64_t *end, size_t size, unsigned flags) {
    REFUSED("copy_file_range", to, NULL, GROWS);
    return REAL(copy_file_range)(from, start, to, end, size, flags);
}

#define ON_FILE(name, arguments, passed, needs) \
    int name arguments { \
        REFUSED(#name, file, NULL, needs); \
        return REAL(name) passed; \
    }
ON_FILE(ftruncate, (int file, off_t length), (file, length), GROWS)
ON_FILE(ftruncate64, (int file, off64_t length), (file, length), GROWS)
ON_FILE(posix_fallocate, (int file, off_t start, off_t length), (file, start, length), GROWS)
ON_FILE(fsync, (int file), (file), GROWS)
ON_FILE(fdatasync, (int file), (file), GROWS)
ON_FILE(fchmod, (int file, mode_t mode), (file, mode), CHANGES)

#define ON_PATH(name, arguments, passed, needs) \
    int name arguments { \
        REFUSED(#name, AT_FDCWD, path, needs); \
        return REAL(name) passed; \
    }
ON_PATH(mkdir, (const char *path, mode_t mode), (path, mode), GROWS)
ON_PATH(rmdir, (const char *path), (path), CHANGES)
ON_PATH(unlink, (const char *path), (path), CHANGES)
ON_PATH(chmod, (const char *path, mode_t mode), (path, mode), CHANGES)
ON_PATH(truncate, (const char *path, off_t length), (path, length), CHANGES)
ON_PATH(truncate64, (const char *path, off64_t length), (path, length), CHANGES)
ON_PATH(rename, (const char *from, const char *path), (from, path), CHANGES)
ON_PATH(link, (const char *from, const char *path), (from, path), GROWS)
ON_PATH(symlink, (const char *from, const char *path), (from, path), GROWS)

#define ON_PATH_AT(name, arguments, passed, needs) \
    int name arguments { \
        REFUSED(#name, folder, path, needs); \
        return REAL(name) passed; \
    }
ON_PATH_AT(mkdirat, (int folder, const char *path, mode_t mode), (folder, path, mode), GROWS)
ON_PATH_AT(unlinkat, (int folder, const char *path, int flags), (folder, path, flags), CHANGES)
ON_PATH_AT(fchmodat, (int folder, const char *path, mode_t mode, int flags), (folder, path, mode, flags), CHANGES)
ON_PATH_AT(renameat, (int from_folder, const char *from, int folder, const char *path), (from_folder, from, folder, path),
           CHANGES)
ON_PATH_AT(renameat2, (int from_folder, const char *from, int folder, const char *path, unsigned flags),
           (from_folder, from, folder, path, flags), CHANGES)
