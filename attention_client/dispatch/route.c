#include "route.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define NO_CHUNK (-1)
#define NO_EXPERT (-1)
#define NOWHERE (-1)
/* A move must save this share of the chunk's own time: less is noise of the rates. */
#define WORTH_MOVING 0.02
/* Time that one more request costs a layer call: about the compiled client's own for a call with one request
 * (docs/performance.md). */
#define REQUEST_S 20e-6

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

/* The server of each chunk, and what follows from it. */
typedef struct {
    ptrdiff_t chunks;
    const int64_t *expert_C;
    const double *work_C;
    int64_t *server_C;
    double *ends_S;    /* seconds from now, with the server's backlog */
    int64_t *chunks_S; /* number of chunks; servers without one are not asked */
} Choice;

static inline bool
holds(const Routing *routing, ptrdiff_t server, int64_t expert)
{
    return routing->shares_SE[server * routing->experts + expert] > 0;
}

static inline double
seconds_at(const Routing *routing, const Choice *choice, ptrdiff_t server, ptrdiff_t chunk)
{
    return routing->rate_S[server] * choice->work_C[chunk];
}

static void
count_chunks(const Routing *routing, Choice *choice)
{
    memcpy(choice->ends_S, routing->backlog_S, (size_t)routing->servers * sizeof(double));
    memset(choice->chunks_S, 0, (size_t)routing->servers * sizeof(int64_t));
    for (ptrdiff_t c = 0; c < choice->chunks; c++) {
        ptrdiff_t server = (ptrdiff_t)choice->server_C[c];
        if (server != NOWHERE) {
            choice->ends_S[server] += seconds_at(routing, choice, server, c);
            choice->chunks_S[server]++;
        }
    }
}

static void
move_chunk(const Routing *routing, Choice *choice, ptrdiff_t chunk, ptrdiff_t to)
{
    ptrdiff_t from = (ptrdiff_t)choice->server_C[chunk];
    choice->ends_S[from] -= seconds_at(routing, choice, from, chunk);
    choice->ends_S[to] += seconds_at(routing, choice, to, chunk);
    choice->chunks_S[from]--;
    choice->chunks_S[to]++;
    choice->server_C[chunk] = to;
}

/* The last to finish among the servers that are asked: nobody waits for the others. NOWHERE: none is asked. */
static ptrdiff_t
last_server(const Routing *routing, const Choice *choice)
{
    ptrdiff_t last = NOWHERE;
    for (ptrdiff_t s = 0; s < routing->servers; s++) {
        if (choice->chunks_S[s] > 0 && (last == NOWHERE || choice->ends_S[s] > choice->ends_S[last])) {
            last = s;
        }
    }
    return last;
}

typedef struct {
    ptrdiff_t chunk;
    ptrdiff_t server;
    double ends; /* the later of the two servers' ends after the move */
} Move;

static Move
best_move(const Routing *routing, const Choice *choice, ptrdiff_t last, bool among_asked)
{
    const double *ends_S = choice->ends_S;
    Move best = {-1, -1, ends_S[last]};
    for (ptrdiff_t c = 0; c < choice->chunks; c++) {
        if (choice->server_C[c] != last) {
            continue;
        }
        double left = ends_S[last] - seconds_at(routing, choice, last, c);
        for (ptrdiff_t s = 0; s < routing->servers; s++) {
            if (s == last || (among_asked && choice->chunks_S[s] == 0) || !holds(routing, s, choice->expert_C[c])) {
                continue;
            }
            double there = ends_S[s] + seconds_at(routing, choice, s, c);
            double later = there > left ? there : left;
            if (later < best.ends) {
                best = (Move){c, s, later};
            }
        }
    }
    return best;
}

/* Moves chunks off the server that would finish last, while that makes the call finish earlier. */
static void
level_chunks(const Routing *routing, Choice *choice, bool among_asked)
{
    /* A chunk may move more than once; the bound on moves is never met in practice. */
    for (ptrdiff_t moves = 0; moves < choice->chunks * routing->servers; moves++) {
        ptrdiff_t last = last_server(routing, choice);
        Move move = last == NOWHERE ? (Move){-1, -1, 0} : best_move(routing, choice, last, among_asked);
        if (move.chunk < 0 ||
            !(choice->ends_S[last] - move.ends > WORTH_MOVING * seconds_at(routing, choice, last, move.chunk))) {
            break;
        }
        move_chunk(routing, choice, move.chunk, move.server);
    }
}

/* ---- merge: ask fewer servers ---------------------------------------------------------------------------- */

/* The asked server with the least to do that is not tried yet; among equals, a different one in each call. */
static ptrdiff_t
least_server(const Routing *routing, const Choice *choice, const uint8_t *tried_S)
{
    ptrdiff_t least = NOWHERE, first = (ptrdiff_t)(routing->draw * (double)routing->servers);
    double least_s = 0;
    for (ptrdiff_t i = 0; i < routing->servers; i++) {
        ptrdiff_t s = (first + i) % routing->servers;
        double own_s = choice->ends_S[s] - routing->backlog_S[s];
        if (choice->chunks_S[s] > 0 && !tried_S[s] && (least == NOWHERE || own_s < least_s)) {
            least = s;
            least_s = own_s;
        }
    }
    return least;
}

/* Gives all chunks of a server to other asked servers. False if one of them has no other replica there. */
static bool
empty_server(const Routing *routing, Choice *choice, ptrdiff_t server)
{
    for (ptrdiff_t c = 0; c < choice->chunks; c++) {
        if (choice->server_C[c] != server) {
            continue;
        }
        ptrdiff_t to = NOWHERE;
        double ends = 0;
        for (ptrdiff_t s = 0; s < routing->servers; s++) {
            double there = choice->ends_S[s] + seconds_at(routing, choice, s, c);
            if (s != server && choice->chunks_S[s] > 0 && holds(routing, s, choice->expert_C[c]) &&
                (to == NOWHERE || there < ends)) {
                to = s;
                ends = there;
            }
        }
        if (to == NOWHERE) {
            return false;
        }
        move_chunk(routing, choice, c, to);
    }
    return true;
}

static void
copy_choice(const Routing *routing, Choice *to, const Choice *from)
{
    memcpy(to->server_C, from->server_C, (size_t)from->chunks * sizeof(int64_t));
    memcpy(to->ends_S, from->ends_S, (size_t)routing->servers * sizeof(double));
    memcpy(to->chunks_S, from->chunks_S, (size_t)routing->servers * sizeof(int64_t));
}

/* Asks fewer servers where that ends the call sooner: a request costs REQUEST_S, whatever it computes.
 * `trial` and `tried_S` are scratch; `tried_S` is zeroed. */
static void
merge_requests(const Routing *routing, Choice *choice, Choice *trial, uint8_t *tried_S)
{
    for (;;) {
        ptrdiff_t least = least_server(routing, choice, tried_S);
        if (least == NOWHERE) {
            break;
        }
        tried_S[least] = 1;
        /* Each other server can take what it does not do until the call ends. */
        double until = choice->ends_S[last_server(routing, choice)] + REQUEST_S, room_s = 0;
        for (ptrdiff_t s = 0; s < routing->servers; s++) {
            room_s += s != least && choice->chunks_S[s] > 0 ? (until - choice->ends_S[s]) / routing->rate_S[s] : 0;
        }
        if (room_s < (choice->ends_S[least] - routing->backlog_S[least]) / routing->rate_S[least]) {
            continue;
        }
        copy_choice(routing, trial, choice);
        if (!empty_server(routing, trial, least)) {
            continue;
        }
        level_chunks(routing, trial, true);
        if (trial->ends_S[last_server(routing, trial)] <= until) {
            copy_choice(routing, choice, trial);
        }
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
    size_t words = experts * (sizeof(Expert) / sizeof(int64_t)) + 6 * servers + 5 * most;
    int64_t *block = malloc(words * sizeof(int64_t) + pairs * sizeof(int32_t) + servers + 1);
    if (block == NULL) {
        return -1;
    }
    Expert *experts_E = (Expert *)block;
    double *ends_S = (double *)(experts_E + experts), *trial_ends_S = ends_S + servers;
    double *work_C = trial_ends_S + servers;
    int64_t *next_S = (int64_t *)(work_C + most), *last_S = next_S + servers;
    int64_t *chunks_S = last_S + servers, *trial_chunks_S = chunks_S + servers;
    int64_t *expert_C = trial_chunks_S + servers, *pairs_C = expert_C + most;
    int64_t *server_C = pairs_C + most, *trial_server_C = server_C + most;
    int32_t *chunk_of_P = (int32_t *)(trial_server_C + most);
    uint8_t *tried_S = (uint8_t *)(chunk_of_P + pairs);
    memset(experts_E, 0, experts * sizeof(Expert));
    memset(routed->work_S, 0, servers * sizeof(double));

    ptrdiff_t chunks = group_pairs(routing, experts_E, chunk_of_P, expert_C, pairs_C);
    for (ptrdiff_t c = 0; c < chunks; c++) {
        work_C[c] = 1.0 + (double)pairs_C[c] / (double)routing->chunk_pairs;
    }
    choose_by_share(routing, experts_E, expert_C, chunks, server_C);
    if (routing->rate_S != NULL) {
        Choice choice = {chunks, expert_C, work_C, server_C, ends_S, chunks_S};
        Choice trial = {chunks, expert_C, work_C, trial_server_C, trial_ends_S, trial_chunks_S};
        memset(tried_S, 0, servers);
        count_chunks(routing, &choice);
        level_chunks(routing, &choice, false);
        merge_requests(routing, &choice, &trial, tried_S);
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
