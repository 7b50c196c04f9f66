/* For LD_PRELOAD: positional reads and writes that move at most 7 bytes (one block of 4096 on descriptors opened with
 * O_DIRECT; of longer buffered requests 4093 bytes, to be done in finite time). With FAULTY_IO_INTERRUPTS in the
 * environment every fifth call fails with EINTR. Calls with flags (preadv2) are left alone. At exit a line
 * "calls interrupted shortened" is added to the file named by FAULTY_IO_COUNTS. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

#define SHORT_BYTES 7
#define LONG_BYTES 4093
#define BLOCK_BYTES 4096
#define PERIOD 5

static atomic_ulong calls, interrupted, shortened;

static int interrupt(void) {
  if ((atomic_fetch_add(&calls, 1) + 1) % PERIOD != 0 || !getenv("FAULTY_IO_INTERRUPTS")) return 0;
  atomic_fetch_add(&interrupted, 1);
  errno = EINTR;
  return 1;
}

static size_t allowed(int fd, size_t wanted) {
  size_t most = wanted > BLOCK_BYTES ? LONG_BYTES : SHORT_BYTES;
  if (fcntl(fd, F_GETFL) & O_DIRECT) most = BLOCK_BYTES;
  if (wanted <= most) return wanted;
  atomic_fetch_add(&shortened, 1);
  return most;
}

#define FLAT(name, buffer_type)                                                           \
  ssize_t name(int fd, buffer_type buffer, size_t count, off64_t offset) {                \
    static ssize_t (*real)(int, buffer_type, size_t, off64_t);                            \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name);                                 \
    return interrupt() ? -1 : real(fd, buffer, allowed(fd, count), offset);               \
  }

#define VECTOR(name)                                                                      \
  ssize_t name(int fd, const struct iovec *parts, int count, off64_t offset) {            \
    static ssize_t (*real)(int, const struct iovec *, int, off64_t);                      \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name);                                 \
    if (count < 1) return real(fd, parts, count, offset);                                 \
    struct iovec first = {parts[0].iov_base, allowed(fd, parts[0].iov_len)};              \
    return interrupt() ? -1 : real(fd, &first, 1, offset);                                \
  }

#define VECTOR_FLAGS(name)                                                                \
  ssize_t name(int fd, const struct iovec *parts, int count, off64_t offset, int flags) { \
    static ssize_t (*real)(int, const struct iovec *, int, off64_t, int);                 \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name);                                 \
    if (count < 1 || flags) return real(fd, parts, count, offset, flags);                 \
    struct iovec first = {parts[0].iov_base, allowed(fd, parts[0].iov_len)};              \
    return interrupt() ? -1 : real(fd, &first, 1, offset, flags);                         \
  }

FLAT(pread, void *)
FLAT(pread64, void *)
FLAT(pwrite, const void *)
FLAT(pwrite64, const void *)
VECTOR(preadv)
VECTOR(preadv64)
VECTOR(pwritev)
VECTOR(pwritev64)
VECTOR_FLAGS(preadv2)
VECTOR_FLAGS(preadv64v2)
VECTOR_FLAGS(pwritev2)
VECTOR_FLAGS(pwritev64v2)

__attribute__((destructor)) static void tell(void) {
  const char *path = getenv("FAULTY_IO_COUNTS");
  FILE *file = path ? fopen(path, "a") : NULL;
  if (!file) return;
  fprintf(file, "%lu %lu %lu\n", atomic_load(&calls), atomic_load(&interrupted), atomic_load(&shortened));
  fclose(file);
}
