#include "level.h"

#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#define NOWHERE (-1)
/* Time that one more request costs a layer call: about the compiled client's own for a call with one request
 * (docs/performance.md). */
#define REQUEST_S 20e-6
/* The search for the least end stops when it is known to this part. */
#define PRECISE 0.008
#define MOST_TRIALS 10
/* How many servers may pass pairs on, one to the next, to relieve one. */
#define DEPTH 6
/* Moves to consider at a server, the best first; and in a chain, with its branches. */
#define CHOICES 16
#define MOST_MOVES 1000
/* Looks at replicas, 10 to 30 ns each: at most so many, or so many for each replica of the call; and not much longer than a
 * tenth of what can be gained. A trial may use four times as many as a successful one did. */
#define LOOKS 16000
#define LOOKS_EACH 8
#define LOOKS_FIRST 256
/* Looks without pruning, where a search with it found nothing: enough for small calls. */
#define LOOKS_AGAIN 800
#define LOOKS_PER_S 4e6
#define LOOKS_FOR_A_SERVER 16

typedef struct {
    int32_t from, to; /* replicas */
    int64_t pairs;
    double there; /* when the other server ends after it */
    double key;   /* the least is tried first */
} Move;

/* ---- moves ------------------------------------------------------------------------------------------------ */

void
count_work(Spread *spread, double load_pairs)
{
    memcpy(spread->ends_S, spread->backlog_S, (size_t)spread->servers * sizeof(double));
    memset(spread->active_S, 0, (size_t)spread->servers * sizeof(int32_t));
    for (ptrdiff_t s = 0; s < spread->servers; s++) {
        spread->pair_S[s] = spread->rate_S[s] / load_pairs;
    }
    for (ptrdiff_t r = 0; r < spread->replicas; r++) {
        if (spread->pairs_R[r] > 0) {
            int32_t s = spread->server_R[r];
            spread->ends_S[s] += spread->rate_S[s] + (double)spread->pairs_R[r] * spread->pair_S[s];
            spread->active_S[s]++;
        }
    }
}

/* Seconds that a replica's server takes for more pairs of it. */
static inline double
seconds_for(const Spread *spread, int32_t replica, int64_t pairs)
{
    int32_t s = spread->server_R[replica];
    double load = spread->pairs_R[replica] > 0 ? 0.0 : spread->rate_S[s];
    return load + (double)pairs * spread->pair_S[s];
}

static void
move_pairs(Spread *spread, int32_t from, int32_t to, int64_t pairs)
{
    int32_t s = spread->server_R[from], t = spread->server_R[to];
    spread->ends_S[t] += seconds_for(spread, to, pairs);
    spread->active_S[t] += spread->pairs_R[to] == 0;
    spread->pairs_R[to] += pairs;
    spread->pairs_R[from] -= pairs;
    spread->ends_S[s] -= seconds_for(spread, from, pairs);
    spread->active_S[s] -= spread->pairs_R[from] == 0;
}

/* The last to end among the servers that are asked: nobody waits for the others. NOWHERE: none is asked. */
static ptrdiff_t
last_server(const Spread *spread)
{
    ptrdiff_t last = NOWHERE;
    for (ptrdiff_t s = 0; s < spread->servers; s++) {
        if (spread->active_S[s] > 0 && (last == NOWHERE || spread->ends_S[s] > spread->ends_S[last])) {
            last = s;
        }
    }
    return last;
}

static void
keep(Spread *spread)
{
    memcpy(spread->kept_R, spread->pairs_R, (size_t)spread->replicas * sizeof(int64_t));
    memcpy(spread->kept_ends_S, spread->ends_S, (size_t)spread->servers * sizeof(double));
    memcpy(spread->kept_active_S, spread->active_S, (size_t)spread->servers * sizeof(int32_t));
}

static void
restore(Spread *spread)
{
    memcpy(spread->pairs_R, spread->kept_R, (size_t)spread->replicas * sizeof(int64_t));
    memcpy(spread->ends_S, spread->kept_ends_S, (size_t)spread->servers * sizeof(double));
    memcpy(spread->active_S, spread->kept_active_S, (size_t)spread->servers * sizeof(int32_t));
}

/* ---- level: everything ends by some time, if that can be found ---------------------------------------------- */

/* A server to relieve, and how far that is. */
typedef struct {
    ptrdiff_t server;
    int depth;        /* of the chains that may follow a move */
    double ends;      /* when it ended at first */
    int before;       /* moves done until then */
    int count, tried; /* choices, and how many were tried */
    bool passed;      /* the last move is done, and its target not yet in time */
    Move choices[CHOICES];
} Relief;

/* A search for moves, and those that it has done. Each relief but the outermost follows a move that is done. */
typedef struct {
    Spread *spread;
    double by;
    int64_t left; /* looks at replicas */
    bool prunes;  /* a server that could not be relieved is not tried again, though others have changed since */
    int done;
    Move done_M[MOST_MOVES];
    Relief reliefs[MOST_MOVES + 1];
} Search;

const size_t SEARCH_BYTES = sizeof(Search);

static void
undo(Search *search, int until)
{
    assert(until >= 0 && search->done <= MOST_MOVES);
    for (; search->done > until; search->done--) {
        const Move *move = &search->done_M[search->done - 1];
        move_pairs(search->spread, move->to, move->from, move->pairs);
    }
}

static void
add_choice(Move *choices, int *count, Move move)
{
    if (*count == CHOICES && choices[CHOICES - 1].key <= move.key) {
        return;
    }
    int at = *count < CHOICES ? (*count)++ : CHOICES - 1;
    assert(at < CHOICES);
    for (; at > 0 && choices[at - 1].key > move.key; at--) {
        choices[at] = choices[at - 1];
    }
    choices[at] = move;
}

/* The moves that could make a server end by `by`: of as many pairs of an expert as that takes, or of all of them.
 * Those after which the other server ends in time come first, and among them those that read the fewest experts. */
static int
find_moves(Search *search, ptrdiff_t server, Move *choices)
{
    const Spread *spread = search->spread;
    double by = search->by;
    int count = 0;
    double excess = (spread->ends_S[server] - by) / spread->pair_S[server];
    /* At least one: the excess may be less than rounding. */
    int64_t enough = excess < 1 ? 1 : excess < 1e15 ? (int64_t)ceil(excess) : (int64_t)1e15;
    for (int32_t i = spread->first_S[server]; i < spread->first_S[server + 1]; i++) {
        int32_t from = spread->own_R[i], expert = spread->expert_R[from];
        int64_t all = spread->pairs_R[from];
        if (all == 0) {
            continue;
        }
        search->left -= spread->first_E[expert + 1] - spread->first_E[expert];
        for (int32_t to = spread->first_E[expert]; to < spread->first_E[expert + 1]; to++) {
            int32_t t = spread->server_R[to];
            if (to == from || spread->closed_S[t]) {
                continue;
            }
            for (int whole = enough >= all; whole < 2; whole++) {
                int64_t pairs = whole ? all : enough;
                double there = spread->ends_S[t] + seconds_for(spread, to, pairs);
                int loads = (spread->pairs_R[to] == 0) - whole;
                double key = there > by ? there : there - by + (loads - 2) * spread->rate_S[t];
                add_choice(choices, &count, (Move){from, to, pairs, there, key});
            }
        }
    }
    return count;
}

typedef enum { RELIEVED, STUCK, OPEN } Verdict;

/* Begins to make a server end in time: as the innermost relief, unless that is settled at once. */
static Verdict
begin_relief(Search *search, int reliefs, ptrdiff_t server, int depth)
{
    const Spread *spread = search->spread;
    double ends = spread->ends_S[server];
    if (ends <= search->by || spread->active_S[server] == 0) {
        return RELIEVED;
    }
    /* Below 0: the last move was to end in time, but for rounding. */
    bool failed = depth <= spread->failed_depth_S[server] && ends >= spread->failed_ends_S[server];
    if (depth < 0 || (search->prunes && failed)) {
        return STUCK;
    }
    assert(reliefs <= MOST_MOVES);
    Relief *relief = &search->reliefs[reliefs];
    relief->server = server;
    relief->depth = depth;
    relief->ends = ends;
    relief->before = search->done;
    relief->count = find_moves(search, server, relief->choices);
    relief->tried = 0;
    relief->passed = false;
    return OPEN;
}

/* The next move that a relief may try, or NULL. */
static const Move *
next_move(const Search *search, Relief *relief)
{
    const Move *move = &relief->choices[relief->tried];
    bool none = relief->tried == relief->count || (move->there > search->by && relief->depth == 0) ||
                search->done == MOST_MOVES || search->left <= 0;
    relief->tried += !none;
    return none ? NULL : move;
}

/* Makes a server end in time, and with it each server that takes something from it, by chains of at most DEPTH more.
 * Returns whether that was done; if not, nothing has changed. A search in depth: after a move come reliefs of its target
 * and, one level less deep, of the server itself. */
static bool
relieve(Search *search, ptrdiff_t server)
{
    Spread *spread = search->spread;
    /* A relief looks at a replica at least, and only its server's own next relief may begin after the last look. */
    int64_t most_reliefs = (search->left > 0 ? search->left : 0) + 2, most_steps = most_reliefs * (2 * CHOICES + 1);
    Verdict verdict = begin_relief(search, 0, server, DEPTH);
    int reliefs = verdict == OPEN;
    for (int64_t step = 0; reliefs > 0; step++) {
        assert(step < most_steps);
        Relief *relief = &search->reliefs[reliefs - 1];
        if (verdict == RELIEVED && !relief->passed) {
            reliefs--;
            continue;
        }
        if (verdict == RELIEVED) {
            relief->passed = false;
            verdict = begin_relief(search, reliefs, relief->server, relief->depth > 0 ? relief->depth - 1 : 0);
            reliefs += verdict == OPEN;
            continue;
        }
        undo(search, relief->before);
        const Move *move = next_move(search, relief);
        if (move == NULL) {
            spread->failed_depth_S[relief->server] = (int8_t)relief->depth;
            spread->failed_ends_S[relief->server] = relief->ends;
            verdict = STUCK;
            reliefs--;
            continue;
        }
        relief->passed = true;
        search->done_M[search->done++] = *move;
        move_pairs(spread, move->from, move->to, move->pairs);
        verdict = begin_relief(search, reliefs, spread->server_R[move->to], relief->depth - 1);
        reliefs += verdict == OPEN;
    }
    return verdict == RELIEVED;
}

/* Makes the last server end in time: first with pruning, which finds most of what there is, and fails soon. */
static bool
relieve_last(Search *search, ptrdiff_t last)
{
    search->done = 0;
    search->prunes = true;
    memset(search->spread->failed_depth_S, NOWHERE, (size_t)search->spread->servers);
    if (relieve(search, last)) {
        return true;
    }
    int64_t rest = search->left > LOOKS_AGAIN ? search->left - LOOKS_AGAIN : 0;
    search->left -= rest;
    search->prunes = false;
    bool done = relieve(search, last);
    search->left += rest;
    return done;
}

static int64_t
most_looks(const Spread *spread)
{
    int64_t each = LOOKS_EACH * spread->replicas;
    return each > LOOKS ? each : LOOKS;
}

/* Makes every asked server end by `by`, with at most `most` of the effort, from which it takes what it used. Returns
 * whether that was found; if not, `restore` what was kept. */
static bool
end_by(Spread *spread, double by, int64_t *effort, int64_t most)
{
    int64_t given = *effort < most ? *effort : most;
    Search *search = spread->search;
    search->spread = spread;
    search->by = by;
    search->left = given;
    bool found = false, ended = false;
    for (int64_t pass = 0; !ended; pass++) {
        assert(pass == 0 || pass < given);
        ptrdiff_t last = last_server(spread);
        found = last == NOWHERE || spread->ends_S[last] <= by;
        /* Looking for the last server is effort, too. */
        search->left -= 1 + spread->servers / 16;
        ended = found || search->left <= 0 || !relieve_last(search, last);
    }
    *effort -= given - search->left;
    return found;
}

/* When the servers would end if their work could be divided at will among all of them: none can end sooner. */
static double
least_end(const Spread *spread)
{
    double work = 0, least = INFINITY;
    for (ptrdiff_t s = 0; s < spread->servers; s++) {
        work += (spread->ends_S[s] - spread->backlog_S[s]) / spread->rate_S[s];
    }
    /* Without the servers whose backlog is longer than that: each time one fewer, at least. */
    double before = INFINITY;
    for (ptrdiff_t pass = 0; least < before || pass == 0; pass++) {
        assert(pass <= spread->servers + 1);
        before = least;
        double rates = 0, sum = work;
        for (ptrdiff_t s = 0; s < spread->servers; s++) {
            if (spread->backlog_S[s] < before) {
                rates += 1 / spread->rate_S[s];
                sum += spread->backlog_S[s] / spread->rate_S[s];
            }
        }
        least = rates > 0 ? sum / rates : 0;
    }
    return least;
}

static void
level(Spread *spread)
{
    ptrdiff_t last = last_server(spread);
    double high = last == NOWHERE ? 0 : spread->ends_S[last], low = least_end(spread);
    double worth = (high - low) * LOOKS_PER_S + (double)(LOOKS_FOR_A_SERVER * spread->servers);
    int64_t effort = most_looks(spread), usual = LOOKS_FIRST + spread->servers;
    effort = worth < (double)effort ? (int64_t)worth : effort;
    for (int trial = 0; trial < MOST_TRIALS && high > low * (1 + PRECISE) && effort > 0; trial++) {
        keep(spread);
        double by = (low + high) / 2;
        int64_t before = effort;
        if (end_by(spread, by, &effort, 4 * usual)) {
            usual = before - effort > usual ? before - effort : usual;
            high = spread->ends_S[last_server(spread)];
        } else {
            restore(spread);
            low = by;
        }
    }
}

/* ---- merge: ask fewer servers ------------------------------------------------------------------------------- */

/* The asked server with the least to do that is not tried yet; among equals, a different one in each call. */
static ptrdiff_t
least_server(const Spread *spread, double draw, const uint8_t *tried_S)
{
    ptrdiff_t least = NOWHERE, first = (ptrdiff_t)(draw * (double)spread->servers);
    double least_s = 0;
    for (ptrdiff_t i = 0; i < spread->servers; i++) {
        ptrdiff_t s = (first + i) % spread->servers;
        double own_s = spread->ends_S[s] - spread->backlog_S[s];
        if (spread->active_S[s] > 0 && !tried_S[s] && (least == NOWHERE || own_s < least_s)) {
            least = s;
            least_s = own_s;
        }
    }
    return least;
}

/* Gives all pairs of a server to open servers. False if one of its experts has no replica there. */
static bool
empty_server(Spread *spread, ptrdiff_t server)
{
    for (int32_t i = spread->first_S[server]; i < spread->first_S[server + 1]; i++) {
        int32_t from = spread->own_R[i], best = NOWHERE, expert = spread->expert_R[from];
        int64_t pairs = spread->pairs_R[from];
        double ends = INFINITY;
        for (int32_t to = spread->first_E[expert]; pairs > 0 && to < spread->first_E[expert + 1]; to++) {
            int32_t t = spread->server_R[to];
            double there = spread->ends_S[t] + seconds_for(spread, to, pairs);
            if (!spread->closed_S[t] && there < ends) {
                best = to;
                ends = there;
            }
        }
        if (pairs > 0 && best == NOWHERE) {
            return false;
        }
        if (pairs > 0) {
            move_pairs(spread, from, best, pairs);
        }
    }
    return true;
}

/* Asks fewer servers where that ends the call sooner: a request costs REQUEST_S, whatever it computes. */
static void
merge_requests(Spread *spread, double draw)
{
    ptrdiff_t least;
    memset(spread->tried_S, 0, (size_t)spread->servers);
    for (ptrdiff_t s = 0; s < spread->servers; s++) {
        spread->closed_S[s] = spread->active_S[s] == 0;
    }
    int64_t effort = LOOKS_FOR_A_SERVER * spread->servers;
    for (ptrdiff_t tried = 0; effort > 0 && (least = least_server(spread, draw, spread->tried_S)) != NOWHERE; tried++) {
        assert(tried < spread->servers);
        effort -= 1 + spread->servers / 16;
        spread->tried_S[least] = 1;
        /* Each other server can take what it does not do until the call ends. */
        double until = spread->ends_S[last_server(spread)] + REQUEST_S, room = 0;
        for (ptrdiff_t s = 0; s < spread->servers; s++) {
            room += s != least && !spread->closed_S[s] ? (until - spread->ends_S[s]) / spread->rate_S[s] : 0;
        }
        /* Their loads may be there already. */
        double pairs = 0;
        for (int32_t i = spread->first_S[least]; i < spread->first_S[least + 1]; i++) {
            pairs += (double)spread->pairs_R[spread->own_R[i]];
        }
        if (room < pairs * spread->pair_S[least] / spread->rate_S[least]) {
            continue;
        }
        keep(spread);
        spread->closed_S[least] = 1;
        if (!empty_server(spread, least) || !end_by(spread, until, &effort, effort)) {
            restore(spread);
            spread->closed_S[least] = 0;
        }
    }
}

void
level_work(Spread *spread, double draw)
{
    memset(spread->closed_S, 0, (size_t)spread->servers);
    level(spread);
    merge_requests(spread, draw);
}
