// Counts what a thread allocates and locks; preloaded, so that whoever calls is counted.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>

// In the static block: what is made when first used would be made with malloc, from inside malloc.
#define STATIC_TLS __attribute__((tls_model("initial-exec")))
static __thread long allocations STATIC_TLS;
static __thread long locks STATIC_TLS;

long counted_allocations(void) { return allocations; }
long counted_locks(void) { return locks; }

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);

void *malloc(size_t size) {
    allocations++;
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size) {
    allocations++;
    return __libc_calloc(count, size);
}

void *realloc(void *old, size_t size) {
    allocations++;
    return __libc_realloc(old, size);
}

void *memalign(size_t alignment, size_t size) {
    allocations++;
    return __libc_memalign(alignment, size);
}

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **out, size_t alignment, size_t size) {
    *out = memalign(alignment, size);
    return *out == NULL ? 12 /* ENOMEM */ : 0;
}

#define COUNTED_LOCK(name, type)                             \
    int name(type *lock) {                                   \
        static int (*original)(type *);                      \
        if (original == NULL) {                              \
            original = (int (*)(type *))dlsym(RTLD_NEXT, #name); \
        }                                                    \
        locks++;                                             \
        return original(lock);                               \
    }

COUNTED_LOCK(pthread_mutex_lock, pthread_mutex_t)
COUNTED_LOCK(pthread_mutex_trylock, pthread_mutex_t)
COUNTED_LOCK(pthread_rwlock_rdlock, pthread_rwlock_t)
COUNTED_LOCK(pthread_rwlock_wrlock, pthread_rwlock_t)
