#if defined(__x86_64__)
#define TARGET __attribute__((target("avx512f")))
#define VECTOR_BYTES 64
#define NAME attend_avx512
#include "floats.h"
#endif
