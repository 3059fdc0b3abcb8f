/* A layer of a kernel that the loop's compiled code can call (`ExpertKernel.direct`).
 *
 * Letters: T tokens, K top-k, H hidden.
 */
#ifndef EXPERT_SERVER_DIRECT_H
#define EXPERT_SERVER_DIRECT_H

#include <stdbool.h>
#include <stdint.h>

/* Name of the capsule, which keeps all memory that `run` reads. */
#define DIRECT_LAYER "expert_server.kernels.DirectLayer"

typedef struct DirectLayer DirectLayer;

struct DirectLayer {
    uint32_t hidden; /* H */
    /* Computes what the kernel's call computes, without the GIL; one caller at a time. T * K is at most 2^16.
     *
     * x: (T, H) bfloat16 or float32. ids: (T, K); a client may change them during the call. scores: (T, K).
     * out: (T, H). Returns false if it cannot, as for an expert that is not held: nothing has changed but `out`.
     */
    bool (*run)(const DirectLayer *layer, const void *x, bool is_bfloat16, const int32_t *ids, const float *scores,
                int tokens, int top_k, float *out);
};

#endif
