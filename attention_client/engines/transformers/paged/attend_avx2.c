#if defined(__x86_64__)
#define TARGET __attribute__((target("avx2,fma")))
#define VECTOR_BYTES 32
#define NAME attend_avx2
#include "floats.h"
#endif
