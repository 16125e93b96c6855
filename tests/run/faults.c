/* File systems that fail or are slow, and a clock that jumps, for the process that loads this.
 *
 * LD_PRELOAD it with FAULTS naming a file that holds a struct faults; whoever writes to that file
 * changes them at once. Only files below `folder` are touched. With TRACE naming a file, a line is
 * added to it for each fsync, mkdir and rename that went well.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct faults {
    int64_t error;        /* errno of what writes; 0: none */
    int64_t microseconds; /* that each write takes longer */
    int64_t seconds;      /* that the clock of the day is ahead */
    char folder[1000];
};

static volatile struct faults *faults;
static int trace = -1;

__attribute__((constructor)) static void load(void)
{
    const char *path = getenv("TRACE");
    if (path)
        trace = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    path = getenv("FAULTS");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *mapped = mmap(NULL, sizeof(struct faults), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED)
        faults = mapped;
}

/* Delay, and return whether to fail, with errno set. */
static int fails(const char *path)
{
    if (!faults || (!faults->error && !faults->microseconds))
        return 0;
    if (strncmp(path, (const char *)faults->folder, strlen((const char *)faults->folder)))
        return 0;
    if (faults->microseconds)
        usleep(faults->microseconds);
    errno = faults->error;
    return errno != 0;
}

static const char *path_of(int file, char path[4096])
{
    char link[40];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, 4095);
    path[length > 0 ? length : 0] = 0;
    return path;
}

static int fails_at(int file)
{
    char path[4096];
    if (!faults || (!faults->error && !faults->microseconds))
        return 0;
    return fails(path_of(file, path));
}

static int traced(const char *call, const char *path, int failed)
{
    if (trace >= 0 && !failed)
        dprintf(trace, "%s %s\n", call, path);
    return failed;
}

#define REAL(name) ((__typeof__(name) *)dlsym(RTLD_NEXT, #name))

#define ON_FILE(type, name, parameters, arguments)                                                 \
    type name parameters                                                                           \
    {                                                                                              \
        return fails_at(file) ? -1 : REAL(name) arguments;                                         \
    }
ON_FILE(ssize_t, write, (int file, const void *from, size_t size), (file, from, size))
ON_FILE(ssize_t, pwrite, (int file, const void *from, size_t size, off_t at), (file, from, size, at))
ON_FILE(ssize_t, pwrite64, (int file, const void *from, size_t size, off64_t at),
        (file, from, size, at))
ON_FILE(ssize_t, writev, (int file, const struct iovec *from, int count), (file, from, count))
ON_FILE(int, fdatasync, (int file), (file))

int fsync(int file)
{
    char path[4096];
    return fails_at(file) ? -1 : traced("fsync", path_of(file, path), REAL(fsync)(file));
}

int mkdir(const char *path, mode_t mode)
{
    return fails(path) ? -1 : traced("mkdir", path, REAL(mkdir)(path, mode));
}

int rename(const char *from, const char *to)
{
    return fails(to) ? -1 : traced("rename", to, REAL(rename)(from, to));
}

#define OPEN(name)                                                                                 \
    int name(const char *path, int flags, ...)                                                     \
    {                                                                                              \
        va_list more;                                                                              \
        va_start(more, flags);                                                                     \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;                    \
        va_end(more);                                                                              \
        return flags & O_CREAT && fails(path) ? -1 : REAL(name)(path, flags, mode);                \
    }
OPEN(open)
OPEN(open64)

int clock_gettime(clockid_t clock, struct timespec *time)
{
    int failed = REAL(clock_gettime)(clock, time);
    if (!failed && faults && clock == CLOCK_REALTIME)
        time->tv_sec += faults->seconds;
    return failed;
}
