/* What all plans of layers read and write: the slots, and the rows of a sparse layout. */
#include "layer.h"

int64_t
count_slots(const int64_t *slots_LS, ptrdiff_t layers, ptrdiff_t servers, ptrdiff_t experts, ptrdiff_t room)
{
    int64_t most = 0, total = 0;
    for (ptrdiff_t l = 0; l < layers; l++) {
        int64_t slots = 0;
        for (ptrdiff_t s = 0; s < servers; s++) {
            int64_t own = slots_LS[l * servers + s];
            if (own < 0 || own > experts) {
                return -1;
            }
            slots += own;
        }
        if (slots < experts) {
            return -1;
        }
        most = slots > most ? slots : most;
        total += slots;
    }
    return total <= room ? most : -1;
}

int64_t
write_rows(const Flow *flow, double *share_N, int64_t at, int64_t *end_S, int32_t *expert, double *share)
{
    for (int32_t e = 0; e < flow->experts; e++) {
        double sum = 0;
        for (int32_t n = flow->head_E[e]; n != NONE; n = flow->next_N[n]) {
            share_N[n] = share_N[n] > LEAST_SHARE ? share_N[n] : LEAST_SHARE;
            sum += share_N[n];
        }
        for (int32_t n = flow->head_E[e]; n != NONE; n = flow->next_N[n]) {
            share_N[n] /= sum;
        }
    }
    for (int32_t s = 0; s < flow->servers; s++) {
        int64_t begin = at;
        for (int32_t n = flow->first_S[s]; n < flow->first_S[s + 1]; n++) {
            if (flow->expert_N[n] == NONE) {
                continue;
            }
            int64_t i = at++;
            for (; i > begin && expert[i - 1] > flow->expert_N[n]; i--) {
                expert[i] = expert[i - 1];
                share[i] = share[i - 1];
            }
            expert[i] = flow->expert_N[n];
            share[i] = share_N[n];
        }
        end_S[s] = at;
    }
    return at;
}
