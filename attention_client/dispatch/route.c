#include "route.h"

/* A move must save this share of the chunk's own time: less is noise of the rates. */
#define WORTH_MOVING 0.02

/* ---- group: pairs to chunks ------------------------------------------------------------------------------ */

ptrdiff_t
find_wrong_expert(const int64_t *ids_P, const uint8_t *wanted_P, ptrdiff_t pairs, int64_t num_experts)
{
    for (ptrdiff_t p = 0; p < pairs; p++) {
        if ((ids_P[p] < 0 || ids_P[p] >= num_experts) && wanted_P[p]) {
            return p;
        }
    }
    return -1;
}

ptrdiff_t
group_pairs(const int64_t *ids_P, const uint8_t *wanted_P, ptrdiff_t pairs, int64_t num_experts, int64_t chunk_pairs,
            Expert *experts_E, int32_t *chunk_of_P, int64_t *expert_C, int64_t *pairs_C)
{
    for (ptrdiff_t p = 0; p < pairs; p++) {
        if (wanted_P[p]) {
            experts_E[ids_P[p]].pairs++;
        }
    }
    int64_t chunks = 0;
    for (int64_t e = 0; e < num_experts; e++) {
        Expert *expert = &experts_E[e];
        expert->first = chunks;
        expert->chunks = (expert->pairs + chunk_pairs - 1) / chunk_pairs;
        for (int64_t i = 0; i < expert->chunks; i++, chunks++) {
            expert_C[chunks] = e;
            pairs_C[chunks] = 0;
        }
    }
    for (ptrdiff_t p = 0; p < pairs; p++) {
        if (!wanted_P[p]) {
            chunk_of_P[p] = NO_CHUNK;
            continue;
        }
        Expert *expert = &experts_E[ids_P[p]];
        int64_t chunk = expert->first;
        if (expert->chunks > 1) {
            chunk += expert->seen * expert->chunks / expert->pairs;
            expert->seen++;
        }
        pairs_C[chunk]++;
        chunk_of_P[p] = (int32_t)chunk;
    }
    return (ptrdiff_t)chunks;
}

/* ---- choose: a server for each chunk, in proportion to the shares ----------------------------------------- */

void
choose_by_share(const int64_t *expert_C, ptrdiff_t chunks, const float *shares_SE, ptrdiff_t servers,
                ptrdiff_t experts, double draw, double step, int64_t *server_C)
{
    for (ptrdiff_t c = 0; c < chunks; c++) {
        const float *share_S = shares_SE + expert_C[c];
        double total = 0;
        for (ptrdiff_t s = 0; s < servers; s++) {
            total += (double)share_S[s * experts];
        }
        /* If rounding keeps every cumulative share below the draw, the last server with a share. */
        double sum = 0;
        server_C[c] = NOWHERE;
        for (ptrdiff_t s = 0; s < servers && sum <= draw * total; s++) {
            if (share_S[s * experts] > 0) {
                sum += (double)share_S[s * experts];
                server_C[c] = s;
            }
        }
        draw += step;
        draw -= draw >= 1 ? 1 : 0;
    }
}

/* ---- level: move chunks off the server that would end last ----------------------------------------------- */

typedef struct {
    ptrdiff_t chunk;
    ptrdiff_t server;
    double ends; /* the later of the two servers' ends after the move */
} Move;

static Move
best_move(const int64_t *server_C, const int64_t *expert_C, const double *work_C, ptrdiff_t chunks,
          const float *shares_SE, ptrdiff_t servers, ptrdiff_t experts, const double *rate_S, const double *ends_S,
          ptrdiff_t last)
{
    Move best = {-1, -1, ends_S[last]};
    for (ptrdiff_t c = 0; c < chunks; c++) {
        if (server_C[c] != last) {
            continue;
        }
        double left = ends_S[last] - rate_S[last] * work_C[c];
        for (ptrdiff_t s = 0; s < servers; s++) {
            if (s == last || !(shares_SE[s * experts + expert_C[c]] > 0)) {
                continue;
            }
            double there = ends_S[s] + rate_S[s] * work_C[c];
            double later = there > left ? there : left;
            if (later < best.ends) {
                best = (Move){c, s, later};
            }
        }
    }
    return best;
}

ptrdiff_t
level_chunks(int64_t *server_C, const int64_t *expert_C, const double *work_C, ptrdiff_t chunks,
             const float *shares_SE, ptrdiff_t servers, ptrdiff_t experts, const double *rate_S, double *ends_S)
{
    for (ptrdiff_t c = 0; c < chunks; c++) {
        if (server_C[c] != NOWHERE) {
            ends_S[server_C[c]] += rate_S[server_C[c]] * work_C[c];
        }
    }
    ptrdiff_t moves = 0;
    /* A chunk may move more than once; the bound on moves is never met in practice. */
    while (servers > 1 && moves < chunks * servers) {
        /* The last to finish among the servers of this call: nobody waits for the others. */
        ptrdiff_t last = NOWHERE;
        for (ptrdiff_t c = 0; c < chunks; c++) {
            if (server_C[c] != NOWHERE && (last == NOWHERE || ends_S[server_C[c]] > ends_S[last])) {
                last = (ptrdiff_t)server_C[c];
            }
        }
        if (last == NOWHERE) {
            break;
        }
        Move move = best_move(server_C, expert_C, work_C, chunks, shares_SE, servers, experts, rate_S, ends_S, last);
        if (move.chunk < 0) {
            break;
        }
        double own = rate_S[last] * work_C[move.chunk];
        if (!(ends_S[last] - move.ends > WORTH_MOVING * own)) {
            break;
        }
        ends_S[last] -= own;
        ends_S[move.server] += rate_S[move.server] * work_C[move.chunk];
        server_C[move.chunk] = move.server;
        moves++;
    }
    return moves;
}

/* ---- split: chunks to the rows of each server ------------------------------------------------------------ */

static inline int64_t
server_of_pair(const int32_t *chunk_of_P, const int64_t *server_C, ptrdiff_t pair)
{
    return chunk_of_P[pair] == NO_CHUNK ? NOWHERE : server_C[chunk_of_P[pair]];
}

void
split_tokens(const int64_t *ids_P, const int32_t *chunk_of_P, ptrdiff_t tokens, ptrdiff_t top_k,
             const int64_t *server_C, ptrdiff_t servers, int64_t *count_S, int64_t *next_S, int64_t *last_S,
             int64_t *rows_out, int32_t *ids_out)
{
    for (ptrdiff_t s = 0; s < servers; s++) {
        count_S[s] = 0;
        last_S[s] = -1;
    }
    for (ptrdiff_t t = 0; t < tokens; t++) {
        for (ptrdiff_t k = 0; k < top_k; k++) {
            int64_t s = server_of_pair(chunk_of_P, server_C, t * top_k + k);
            if (s != NOWHERE && last_S[s] != t) {
                last_S[s] = t;
                count_S[s]++;
            }
        }
    }
    int64_t next = 0;
    for (ptrdiff_t s = 0; s < servers; s++) {
        next_S[s] = next;
        last_S[s] = -1;
        next += count_S[s];
    }
    for (ptrdiff_t t = 0; t < tokens; t++) {
        for (ptrdiff_t k = 0; k < top_k; k++) {
            int64_t s = server_of_pair(chunk_of_P, server_C, t * top_k + k);
            if (s == NOWHERE) {
                continue;
            }
            if (last_S[s] != t) {
                last_S[s] = t;
                for (ptrdiff_t j = 0; j < top_k; j++) {
                    ids_out[next_S[s] * top_k + j] = NO_EXPERT;
                }
                rows_out[next_S[s]++] = t;
            }
            ids_out[(next_S[s] - 1) * top_k + k] = (int32_t)ids_P[t * top_k + k];
        }
    }
}
