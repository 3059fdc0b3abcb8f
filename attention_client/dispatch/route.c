#include "route.h"

#include <assert.h>
#include <string.h>

#include "../../eaas/wire/mutant.h"
#include "level.h"
#include "memory.h"

#define NO_EXPERT (-1)
#define NOWHERE (-1)
/* Multiples modulo 1 of either number are evenly spread, and so are the points of both (1/g and 1/g**2 of the plastic
 * number g: M. Roberts' R2 sequence). */
#define CALL_STEP 0.7548776662466927
#define CHUNK_STEP 0.5698402909980532
#define LAYER_STEP 0.6180339887498949

/* ---- draw: a replica for each chunk, in proportion to the shares ------------------------------------------- */

/* Lists the replicas of the experts with pairs, by expert and then by server; `next_S` is scratch. */
static void
list_replicas(const Routing *routing, const int64_t *pairs_E, Spread *spread, float *share_R, int64_t *next_S)
{
    int32_t r = 0;
    memset(next_S, 0, (size_t)routing->servers * sizeof(int64_t));
    for (ptrdiff_t e = 0; e < routing->experts; e++) {
        spread->first_E[e] = r;
        for (int32_t i = routing->first_X[e]; pairs_E[e] > 0 && i < routing->first_X[e + 1]; i++, r++) {
            int32_t s = routing->server_N[i];
            spread->server_R[r] = s;
            spread->expert_R[r] = (int32_t)e;
            spread->pairs_R[r] = 0;
            share_R[r] = routing->share_N[i];
            next_S[s]++;
        }
    }
    spread->first_E[routing->experts] = r;
    spread->replicas = r;
    int32_t own = 0;
    for (ptrdiff_t s = 0; s < routing->servers; s++) {
        int32_t count = (int32_t)next_S[s];
        spread->first_S[s] = own;
        next_S[s] = own;
        own += count;
    }
    spread->first_S[routing->servers] = own;
    for (int32_t i = 0; i < r; i++) {
        spread->own_R[next_S[spread->server_R[i]]++] = i;
    }
}

double
draw_of(uint64_t call, uint64_t layer)
{
    double draw = (MUTANT(20) ? 0.0 : (double)call * CALL_STEP) + (double)layer * LAYER_STEP;
    return draw - (double)(int64_t)draw;
}

/* The first replica whose cumulative share of the expert passes `draw`; the last one if rounding keeps all below. */
static int32_t
draw_replica(const Spread *spread, const float *share_R, ptrdiff_t expert, double draw)
{
    double total = 0, sum = 0;
    int32_t first = spread->first_E[expert], end = spread->first_E[expert + 1], r = first;
    for (int32_t i = first; i < end; i++) {
        total += (double)share_R[i];
    }
    for (int32_t i = first; i < end && sum <= draw * total; i++) {
        sum += (double)share_R[i];
        r = i;
    }
    return r;
}

/* Gives each expert's pairs to its replicas, in even chunks of at most `chunk_pairs`: the call's draw for the first
 * chunk, CHUNK_STEP more, modulo 1, for each next one. Returns the number of pairs of experts without a replica. */
static int64_t
draw_chunks(const Routing *routing, const int64_t *pairs_E, Spread *spread, const float *share_R, int64_t chunk_pairs)
{
    assert(chunk_pairs >= 1);
    double draw = routing->draw;
    int64_t left = 0;
    for (ptrdiff_t e = 0; e < routing->experts; e++) {
        if (spread->first_E[e] == spread->first_E[e + 1]) {
            left += pairs_E[e];
            continue;
        }
        int64_t chunks = (pairs_E[e] + chunk_pairs - 1) / chunk_pairs, begin = 0;
        for (int64_t i = 1; i <= chunks; i++) {
            int64_t end = (pairs_E[e] * i + chunks - 1) / chunks;
            spread->pairs_R[draw_replica(spread, share_R, e, draw)] += end - begin;
            begin = end;
            draw += CHUNK_STEP;
            draw -= draw >= 1 ? 1 : 0;
        }
    }
    return left;
}

/* ---- rows: each server's tokens, and their experts there ----------------------------------------------------- */

/* Gives the wanted pairs of each expert, in order, to its replicas, and counts the tokens of each server. `pairs_R` is
 * used up; `next_E` and `last_S` are scratch. Returns the sum of the counts. */
static int64_t
place_pairs(const Routing *routing, const Spread *spread, int32_t *next_E, int32_t *last_S, int32_t *server_P,
            int64_t *count_S)
{
    ptrdiff_t top_k = routing->top_k, p = 0;
    int64_t rows = 0;
    memcpy(next_E, spread->first_E, (size_t)routing->experts * sizeof(int32_t));
    for (ptrdiff_t s = 0; s < routing->servers; s++) {
        count_S[s] = 0;
        last_S[s] = -1;
    }
    for (ptrdiff_t t = 0; t < routing->tokens; t++) {
        for (ptrdiff_t k = 0; k < top_k; k++, p++) {
            server_P[p] = NOWHERE;
            if (!routing->wanted_P[p]) {
                continue;
            }
            int64_t e = routing->ids_P[p];
            int32_t r = next_E[e], end = spread->first_E[e + 1];
            assert(end <= spread->replicas);
            while (r < end && spread->pairs_R[r] == 0) {
                r++;
            }
            next_E[e] = r;
            if (r < end) {
                int32_t s = spread->server_R[r];
                spread->pairs_R[r]--;
                server_P[p] = s;
                count_S[s] += last_S[s] != t;
                rows += last_S[s] != t;
                last_S[s] = (int32_t)t;
            }
        }
    }
    return rows;
}

/* Fills the tokens of each server, server by server, and their experts there. next_S and last_S are scratch. */
static void
fill_rows(const Routing *routing, const int32_t *server_P, int64_t *next_S, int32_t *last_S, const Routed *routed)
{
    ptrdiff_t tokens = routing->tokens, top_k = routing->top_k, servers = routing->servers, p = 0;
    int64_t next = 0;
    for (ptrdiff_t s = 0; s < servers; s++) {
        next_S[s] = next;
        last_S[s] = -1;
        next += routed->count_S[s];
    }
    int32_t *ids_out = routed->ids_out;
    for (ptrdiff_t i = 0; i < next * top_k; i++) {
        ids_out[i] = NO_EXPERT;
    }
    for (ptrdiff_t t = 0; t < tokens; t++) {
        for (ptrdiff_t k = 0; k < top_k; k++, p++) {
            int32_t s = server_P[p];
            if (s == NOWHERE) {
                continue;
            }
            if (last_S[s] != t) {
                last_S[s] = (int32_t)t;
                routed->rows_out[next_S[s]++] = t;
            }
            ids_out[(next_S[s] - 1) * top_k + k] = (int32_t)routing->ids_P[p];
        }
    }
}

/* ---- all of it ------------------------------------------------------------------------------------------- */

bool
are_replicas(const int32_t *first_X, ptrdiff_t experts, const int32_t *server_N, ptrdiff_t count, ptrdiff_t servers)
{
    if (first_X[0] < 0 || first_X[experts] > count) {
        return false;
    }
    for (ptrdiff_t e = 0; e < experts; e++) {
        if (first_X[e] > first_X[e + 1]) {
            return false;
        }
    }
    for (ptrdiff_t e = 0; e < experts; e++) {
        int32_t before = -1;
        for (int32_t i = first_X[e]; i < first_X[e + 1]; i++) {
            if (server_N[i] <= before || server_N[i] >= servers) {
                return false;
            }
            before = server_N[i];
        }
    }
    return true;
}

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

/* The scratch memory of a routing. */
typedef struct {
    Spread spread;
    int64_t *pairs_E, *next_S;
    float *share_R;
    int32_t *next_E, *last_S, *server_P;
} Scratch;

/* Lays out `memory`, or none if it is NULL. Returns the bytes. */
static size_t
lay_out(Scratch *scratch, char *memory, ptrdiff_t pairs, ptrdiff_t servers, ptrdiff_t experts, ptrdiff_t replicas)
{
    Spread *spread = &scratch->spread;
    size_t used = 0;
    scratch->pairs_E = take_array(memory, &used, experts, sizeof(int64_t));
    scratch->next_S = take_array(memory, &used, servers, sizeof(int64_t));
    scratch->share_R = take_array(memory, &used, replicas, sizeof(float));
    scratch->next_E = take_array(memory, &used, experts, sizeof(int32_t));
    scratch->last_S = take_array(memory, &used, servers, sizeof(int32_t));
    scratch->server_P = take_array(memory, &used, pairs, sizeof(int32_t));
    spread->pair_S = take_array(memory, &used, servers, sizeof(double));
    spread->server_R = take_array(memory, &used, replicas, sizeof(int32_t));
    spread->expert_R = take_array(memory, &used, replicas, sizeof(int32_t));
    spread->first_E = take_array(memory, &used, experts + 1, sizeof(int32_t));
    spread->first_S = take_array(memory, &used, servers + 1, sizeof(int32_t));
    spread->own_R = take_array(memory, &used, replicas, sizeof(int32_t));
    spread->pairs_R = take_array(memory, &used, replicas, sizeof(int64_t));
    spread->ends_S = take_array(memory, &used, servers, sizeof(double));
    spread->active_S = take_array(memory, &used, servers, sizeof(int32_t));
    spread->closed_S = take_array(memory, &used, servers, 1);
    spread->tried_S = take_array(memory, &used, servers, 1);
    spread->failed_depth_S = take_array(memory, &used, servers, 1);
    spread->failed_ends_S = take_array(memory, &used, servers, sizeof(double));
    spread->kept_R = take_array(memory, &used, replicas, sizeof(int64_t));
    spread->kept_ends_S = take_array(memory, &used, servers, sizeof(double));
    spread->kept_active_S = take_array(memory, &used, servers, sizeof(int32_t));
    spread->search = take_array(memory, &used, 1, SEARCH_BYTES);
    return used;
}

size_t
route_workspace(ptrdiff_t pairs, ptrdiff_t servers, ptrdiff_t experts, ptrdiff_t replicas)
{
    return lay_out(&(Scratch){0}, NULL, pairs, servers, experts, replicas);
}

int64_t
route(const Routing *routing, const Routed *routed, void *workspace)
{
    ptrdiff_t servers = routing->servers, experts = routing->experts, pairs = routing->tokens * routing->top_k;
    Scratch scratch;
    lay_out(&scratch, workspace, pairs, servers, experts, routing->first_X[experts] - routing->first_X[0]);
    Spread *spread = &scratch.spread;
    spread->servers = servers;
    spread->experts = experts;
    spread->rate_S = routing->rate_S;
    spread->backlog_S = routing->backlog_S;
    memset(scratch.pairs_E, 0, (size_t)experts * sizeof(int64_t));
    for (ptrdiff_t p = 0; p < pairs; p++) {
        if (routing->wanted_P[p]) {
            scratch.pairs_E[routing->ids_P[p]]++;
        }
    }
    list_replicas(routing, scratch.pairs_E, spread, scratch.share_R, scratch.next_S);
    bool levels = routing->rate_S != NULL;
    int64_t chunk_pairs = levels || routing->load_pairs < 1 ? INT64_MAX / 2 : (int64_t)routing->load_pairs;
    int64_t left = draw_chunks(routing, scratch.pairs_E, spread, scratch.share_R, chunk_pairs);
    if (levels) {
        count_work(spread, routing->load_pairs);
        level_work(spread, routing->draw);
    }
    memset(routed->work_S, 0, (size_t)servers * sizeof(double));
    memset(routed->pairs_S, 0, (size_t)servers * sizeof(double));
    for (ptrdiff_t r = 0; r < spread->replicas; r++) {
        if (spread->pairs_R[r] > 0) {
            routed->work_S[spread->server_R[r]] += 1.0 + (double)spread->pairs_R[r] / routing->load_pairs;
            routed->pairs_S[spread->server_R[r]] += (double)spread->pairs_R[r];
        }
    }
    int64_t rows = place_pairs(routing, spread, scratch.next_E, scratch.last_S, scratch.server_P, routed->count_S);
    if (rows > routed->most_rows) {
        return -1;
    }
    fill_rows(routing, scratch.server_P, scratch.next_S, scratch.last_S, routed);
    return left;
}
