/* Loaded before the C library: counts the blocks of memory that a thread takes while it is watched. */
#include <stddef.h>
#include <stdint.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

static uintptr_t first, end; /* the code of a module */
static long by_module, by_all;
static _Thread_local int watched __attribute__((tls_model("initial-exec")));

void
set_module(uintptr_t module_first, uintptr_t module_end)
{
    first = module_first;
    end = module_end;
}

/* Watch this thread, or no longer. Returns the blocks so far: taken by the module's own code, or by any. */
long
watch(int on, int only_module)
{
    watched = on;
    return only_module ? by_module : by_all;
}

static void
count(void *caller)
{
    by_all += watched;
    by_module += watched && (uintptr_t)caller >= first && (uintptr_t)caller < end;
}

void *
malloc(size_t size)
{
    count(__builtin_return_address(0));
    return __libc_malloc(size);
}

void *
calloc(size_t items, size_t size)
{
    count(__builtin_return_address(0));
    return __libc_calloc(items, size);
}

void *
realloc(void *block, size_t size)
{
    count(__builtin_return_address(0));
    return __libc_realloc(block, size);
}

void *
aligned_alloc(size_t alignment, size_t size)
{
    count(__builtin_return_address(0));
    return __libc_memalign(alignment, size);
}

int
posix_memalign(void **block, size_t alignment, size_t size)
{
    count(__builtin_return_address(0));
    *block = __libc_memalign(alignment, size);
    return *block == NULL ? 12 : 0;
}
