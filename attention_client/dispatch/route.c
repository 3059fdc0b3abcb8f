#include "route.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define NO_CHUNK (-1)
#define NO_EXPERT (-1)
#define NOWHERE (-1)
/* A move must save this share of the chunk's own time: less is noise of the rates. */
#define WORTH_MOVING 0.02

/* ---- group: pairs to chunks ------------------------------------------------------------------------------ */

typedef struct {
    int64_t pairs;
    int64_t chunks;
    int64_t first; /* chunk */
    int64_t seen;
} Expert;

/* Groups the wanted pairs of each expert into even chunks.
 * experts_E is scratch, zeroed. Returns the number of chunks: at most pairs, and at most E + pairs / chunk_pairs. */
static ptrdiff_t
group_pairs(const Routing *routing, Expert *experts_E, int32_t *chunk_of_P, int64_t *expert_C, int64_t *pairs_C)
{
    const int64_t *ids_P = routing->ids_P;
    const uint8_t *wanted_P = routing->wanted_P;
    ptrdiff_t pairs = routing->tokens * routing->top_k;
    for (ptrdiff_t p = 0; p < pairs; p++) {
        if (wanted_P[p]) {
            experts_E[ids_P[p]].pairs++;
        }
    }
    int64_t chunks = 0;
    for (ptrdiff_t e = 0; e < routing->experts; e++) {
        Expert *expert = &experts_E[e];
        expert->first = chunks;
        expert->chunks = (expert->pairs + routing->chunk_pairs - 1) / routing->chunk_pairs;
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

static inline double
share_of(const Routing *routing, ptrdiff_t server, int64_t expert)
{
    ptrdiff_t place = server * routing->experts + expert;
    return routing->split_SE != NULL ? routing->split_SE[place] : (double)routing->shares_SE[place];
}

/* Assigns each chunk to the first server whose cumulative share of the expert passes the chunk's draw: `draw` for
 * the first chunk, `step` more, modulo 1, for each next one. NOWHERE if no share is above 0.
 *
 * By the call's own shares, the i-th of an expert's n chunks draws from (i, i + 1) / n, which is its part of the
 * expert's load; where in that interval differs by expert and by call. */
static void
choose_by_share(const Routing *routing, const Expert *experts_E, const int64_t *expert_C, ptrdiff_t chunks,
                int64_t *server_C)
{
    double next = routing->draw;
    for (ptrdiff_t c = 0; c < chunks; c++) {
        double draw = next, total = 0;
        if (routing->split_SE != NULL) {
            const Expert *expert = &experts_E[expert_C[c]];
            draw += (double)expert_C[c] * routing->step;
            draw -= (double)(int64_t)draw;
            draw = ((double)(c - expert->first) + draw) / (double)expert->chunks;
        }
        for (ptrdiff_t s = 0; s < routing->servers; s++) {
            total += share_of(routing, s, expert_C[c]);
        }
        /* If rounding keeps every cumulative share below the draw, the last server with a share. */
        double sum = 0;
        server_C[c] = NOWHERE;
        for (ptrdiff_t s = 0; s < routing->servers && sum <= draw * total; s++) {
            double share = share_of(routing, s, expert_C[c]);
            if (share > 0) {
                sum += share;
                server_C[c] = s;
            }
        }
        if (routing->split_SE == NULL) {
            next += routing->step;
            next -= next >= 1 ? 1 : 0;
        }
    }
}

/* ---- level: move chunks off the server that would end last ----------------------------------------------- */

typedef struct {
    ptrdiff_t chunk;
    ptrdiff_t server;
    double ends; /* the later of the two servers' ends after the move */
} Move;

static Move
best_move(const Routing *routing, const int64_t *server_C, const int64_t *expert_C, const double *work_C,
          ptrdiff_t chunks, const double *ends_S, ptrdiff_t last)
{
    const double *rate_S = routing->rate_S;
    Move best = {-1, -1, ends_S[last]};
    for (ptrdiff_t c = 0; c < chunks; c++) {
        if (server_C[c] != last) {
            continue;
        }
        double left = ends_S[last] - rate_S[last] * work_C[c];
        for (ptrdiff_t s = 0; s < routing->servers; s++) {
            if (s == last || !(routing->shares_SE[s * routing->experts + expert_C[c]] > 0)) {
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

/* Moves chunks off the server that would finish last, while that makes the call finish earlier. ends_S is scratch. */
static void
level_chunks(const Routing *routing, int64_t *server_C, const int64_t *expert_C, const double *work_C,
             ptrdiff_t chunks, double *ends_S)
{
    const double *rate_S = routing->rate_S;
    memcpy(ends_S, routing->backlog_S, (size_t)routing->servers * sizeof(double));
    for (ptrdiff_t c = 0; c < chunks; c++) {
        if (server_C[c] != NOWHERE) {
            ends_S[server_C[c]] += rate_S[server_C[c]] * work_C[c];
        }
    }
    /* A chunk may move more than once; the bound on moves is never met in practice. */
    for (ptrdiff_t moves = 0; moves < chunks * routing->servers; moves++) {
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
        Move move = best_move(routing, server_C, expert_C, work_C, chunks, ends_S, last);
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
    }
}

/* ---- split: chunks to the rows of each server ------------------------------------------------------------ */

static inline int64_t
server_of_pair(const int32_t *chunk_of_P, const int64_t *server_C, ptrdiff_t pair)
{
    return chunk_of_P[pair] == NO_CHUNK ? NOWHERE : server_C[chunk_of_P[pair]];
}

/* Fills the tokens of each server, server by server, and their experts there. next_S and last_S are scratch. */
static void
split_tokens(const Routing *routing, const int32_t *chunk_of_P, const int64_t *server_C, int64_t *next_S,
             int64_t *last_S, const Routed *routed)
{
    ptrdiff_t tokens = routing->tokens, top_k = routing->top_k, servers = routing->servers;
    int64_t *count_S = routed->count_S;
    int32_t *ids_out = routed->ids_out;
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
                routed->rows_out[next_S[s]++] = t;
            }
            ids_out[(next_S[s] - 1) * top_k + k] = (int32_t)routing->ids_P[t * top_k + k];
        }
    }
}

/* ---- all of it ------------------------------------------------------------------------------------------- */

ptrdiff_t
find_wrong_expert(const Routing *routing)
{
    for (ptrdiff_t p = 0; p < routing->tokens * routing->top_k; p++) {
        if (routing->wanted_P[p] && (routing->ids_P[p] < 0 || routing->ids_P[p] >= routing->experts)) {
            return p;
        }
    }
    return -1;
}

int64_t
route(const Routing *routing, const Routed *routed)
{
    size_t servers = (size_t)routing->servers, experts = (size_t)routing->experts;
    size_t pairs = (size_t)(routing->tokens * routing->top_k);
    /* One chunk per expert, plus one per `chunk_pairs` pairs; never more than pairs. */
    size_t most = experts + pairs / (size_t)routing->chunk_pairs;
    most = most < pairs ? most : pairs;
    /* All scratch memory in one block: 64-bit words, then the 32-bit chunk of each pair. */
    size_t words = experts * (sizeof(Expert) / sizeof(int64_t)) + 3 * servers + 4 * most;
    int64_t *block = malloc(words * sizeof(int64_t) + pairs * sizeof(int32_t) + 1);
    if (block == NULL) {
        return -1;
    }
    Expert *experts_E = (Expert *)block;
    double *ends_S = (double *)(experts_E + experts), *work_C = ends_S + servers;
    int64_t *next_S = (int64_t *)(work_C + most), *last_S = next_S + servers, *expert_C = last_S + servers;
    int64_t *pairs_C = expert_C + most, *server_C = pairs_C + most;
    int32_t *chunk_of_P = (int32_t *)(server_C + most);
    memset(experts_E, 0, experts * sizeof(Expert));
    memset(routed->work_S, 0, servers * sizeof(double));

    ptrdiff_t chunks = group_pairs(routing, experts_E, chunk_of_P, expert_C, pairs_C);
    for (ptrdiff_t c = 0; c < chunks; c++) {
        work_C[c] = 1.0 + (double)pairs_C[c] / (double)routing->chunk_pairs;
    }
    choose_by_share(routing, experts_E, expert_C, chunks, server_C);
    if (routing->rate_S != NULL) {
        level_chunks(routing, server_C, expert_C, work_C, chunks, ends_S);
    }
    split_tokens(routing, chunk_of_P, server_C, next_S, last_S, routed);
    int64_t left = 0;
    for (ptrdiff_t c = 0; c < chunks; c++) {
        if (server_C[c] == NOWHERE) {
            left += pairs_C[c];
        } else {
            routed->work_S[server_C[c]] += work_C[c];
        }
    }
    free(block);
    return left;
}
