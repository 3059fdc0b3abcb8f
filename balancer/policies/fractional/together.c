/* Moves experts and shares of a layer so that the servers' peak, mean over iterations, falls.
 *
 * With fixed shares, a server's load in iteration t is the sum over its experts of share * load(t). The objective is
 *
 *     F = sum over t of weight(t) * (sum over s of full(s, t)^p)^(1/p),    p = 8,
 *
 * a smooth bound of the mean peak: where experts peak together on one server, its power grows in the same iterations.
 * F therefore holds all moments of the window, the covariance of every two experts included, without a matrix of them.
 *
 *   shares  F is convex in them: Newton's step on the share that two replicas of an expert exchange, in sweeps.
 *   moves   The server with the most part in F gives a half of an expert to a server in the place of a spare replica, or
 *           swaps an expert. The targets are the servers that are least full while the hot one is. Changes of F are
 *           exact for the powers and linear for the root, which is concave: the gain is never less than estimated.
 */
#include "together.h"

#include <math.h>
#include <string.h>

#define POWER 8
#define TARGETS 12       /* servers tried for a hot one's load */
#define SCREEN 4         /* a first estimate of a gain looks at every fourth vector, ... */
#define SCREEN_FROM 8    /* ... if there are this many, ... */
#define DOUBT 0.8f       /* ... and may be wrong by a fifth */
#define MOST_STUCK 16   /* hottest servers without a move that pays, after which the search ends */
#define MOST_MOVES 2     /* per slot */
#define LEVEL_EVERY 8    /* moves between two passes over all shares */
#define LAST_SWEEPS 4

#define TINY 1e-30f

static inline Lanes
power6(Lanes x)
{
    Lanes x2 = x * x;
    return x2 * x2 * x2;
}

static inline Lanes
power8(Lanes x)
{
    Lanes x2 = x * x, x4 = x2 * x2;
    return x4 * x4;
}

WIDE void
add_load(Together *search, int32_t server, int32_t expert, float share)
{
    Lanes *full = full_of(search, server);
    const Lanes *load = load_of(search, expert);
    float part = share / (float)search->layer->speed_S[server];
    search->dirty_S[server] = 1;
    for (int32_t t = 0; t < search->vectors; t++) {
        full[t] += part * load[t];
    }
}

WIDE static void
evaluate(Together *search)
{
    int32_t count = search->vectors, servers = search->layer->servers;
    for (int32_t t = 0; t < count; t++) {
        search->sum_T[t] = (Lanes){0} + TINY;
    }
    for (int32_t s = 0; s < servers; s++) {
        const Lanes *full = full_of(search, s);
        Lanes *power = search->power_ST + (size_t)s * (size_t)count;
        if (search->dirty_S[s]) {
            for (int32_t t = 0; t < count; t++) {
                power[t] = power8(full[t]);
            }
            search->dirty_S[s] = 0;
        }
        for (int32_t t = 0; t < count; t++) {
            search->sum_T[t] += power[t];
        }
    }
    Lanes value = {0};
    for (int32_t t = 0; t < count; t++) {
        Lanes root;
        for (int32_t i = 0; i < LANES; i++) {
            root[i] = sqrtf(sqrtf(sqrtf(search->sum_T[t][i])));
        }
        value += search->weight_T[t] * root;
        search->slope_T[t] = search->weight_T[t] * root / search->sum_T[t] / POWER;
    }
    search->value = total(value);
    for (int32_t s = 0; s < servers; s++) {
        const Lanes *power = search->power_ST + (size_t)s * (size_t)count;
        Lanes heat = {0};
        for (int32_t t = 0; t < count; t++) {
            heat += search->slope_T[t] * power[t];
        }
        search->heat_S[s] = total(heat);
    }
}

/* Change of the objective if a server gets `one` parts of an expert's load and `two` of another's. */
WIDE static float
change_by(const Together *search, int32_t step, int32_t server, int32_t expert, float one, int32_t other, float two)
{
    const Lanes *full = full_of(search, server), *load = load_of(search, expert), *more = load_of(search, other);
    const Lanes *power = search->power_ST + (size_t)server * (size_t)search->vectors;
    float speed = (float)search->layer->speed_S[server];
    Lanes sum = {0};
    one /= speed;
    two /= speed;
    for (int32_t t = step / 2; t < search->vectors; t += step) {
        sum += search->slope_T[t] * (power8(full[t] + one * load[t] + two * more[t]) - power[t]);
    }
    return total(sum) * (float)step;
}

static float
change(const Together *search, int32_t server, int32_t expert, float one, int32_t other, float two)
{
    return change_by(search, 1, server, expert, one, other, two);
}

/* Newton's step on the share that a pair of an expert's replicas exchange. */
WIDE static void
level_pair(Together *search, int32_t from, int32_t to)
{
    const Flow *flow = &search->layer->flow_B[0];
    int32_t a = flow->server_N[from], b = flow->server_N[to];
    Lanes *one = full_of(search, a), *two = full_of(search, b);
    const Lanes *load = load_of(search, flow->expert_N[from]);
    float speed = (float)search->layer->speed_S[a], other = (float)search->layer->speed_S[b];
    Lanes first = {0}, second = {0};
    for (int32_t t = 0; t < search->vectors; t++) {
        Lanes p = power6(one[t]) / speed, q = power6(two[t]) / other, w = search->slope_T[t] * load[t];
        first += w * (p * one[t] - q * two[t]);
        second += w * load[t] * (p / speed + q / other);
    }
    float up = total(first), down = total(second), step = down > 0 ? up / (down * (POWER - 1)) : 0;
    /* Powers of a very slow server's fullness may be infinite. */
    step = isfinite(step) ? step : 0;
    step = step > search->share_N[from] ? search->share_N[from] : step;
    step = step < -search->share_N[to] ? -search->share_N[to] : step;
    search->share_N[from] -= step;
    search->share_N[to] += step;
    search->dirty_S[a] = search->dirty_S[b] = 1;
    for (int32_t t = 0; t < search->vectors; t++) {
        one[t] -= step / speed * load[t];
        two[t] += step / other * load[t];
    }
}

static void
level_expert(Together *search, int32_t expert)
{
    const Flow *flow = &search->layer->flow_B[0];
    for (int32_t n = flow->head_E[expert]; n != NONE; n = flow->next_N[n]) {
        for (int32_t m = flow->next_N[n]; m != NONE; m = flow->next_N[m]) {
            level_pair(search, n, m);
        }
    }
}

void
level_all(Together *search, int32_t sweeps)
{
    for (int32_t i = 0; i < sweeps; i++) {
        for (int32_t e = 0; e < search->layer->experts; e++) {
            level_expert(search, e);
        }
        evaluate(search);
    }
}

typedef struct {
    int32_t from, to;
    int32_t heir; /* the slot whose replica takes the tokens of the one that goes; NONE: they swap */
    bool swap;
    float gain;
} Move;

/* Loads that a move adds. */
static int32_t
loads_of(const Together *search, const Move *move)
{
    const Flow *flow = &search->layer->flow_B[0];
    int32_t a = flow->server_N[move->from], b = flow->server_N[move->to];
    int32_t e = flow->expert_N[move->from], f = flow->expert_N[move->to];
    int32_t loads = !was_held(search, b, e) - (f != NONE && !was_held(search, b, f));
    if (move->swap) {
        loads += f != NONE && !was_held(search, a, f);
        loads -= !was_held(search, a, e);
    }
    return loads;
}

/* The other replica that takes over with the least cost; none of the hot server, whose load changes, too. */
static float
find_heir(const Together *search, int32_t hot, int32_t slot, int32_t *heir)
{
    const Flow *flow = &search->layer->flow_B[0];
    int32_t e = flow->expert_N[slot];
    float least = INFINITY;
    *heir = NONE;
    if (e == NONE) {
        return 0;
    }
    for (int32_t m = flow->head_E[e]; m != NONE; m = flow->next_N[m]) {
        if (m != slot && flow->server_N[m] != hot) {
            float cost = change(search, flow->server_N[m], e, search->share_N[slot], e, 0);
            if (cost < least) {
                least = cost;
                *heir = m;
            }
        }
    }
    return least;
}

/* What the screen's iterations say about swaps of a hot server's slots with a target's: the gain of each pair, less the
 * price. `x_IQ`, `y_JQ`: the slots' loads over the hot server's speed. */
WIDE static void
screen_swaps(const Together *search, int32_t hot, int32_t b, int32_t ours, int32_t theirs)
{
    const Pairs *pairs = &search->pairs;
    const Lanes *full = full_of(search, hot), *target = full_of(search, b);
    const Lanes *power = search->power_ST + (size_t)hot * (size_t)search->vectors;
    const Lanes *other = search->power_ST + (size_t)b * (size_t)search->vectors;
    Lanes ratio = (Lanes){0} + (float)(search->layer->speed_S[hot] / search->layer->speed_S[b]), now = {0};
    int32_t count = 0;
    for (int32_t t = search->screen / 2; t < search->vectors; t += search->screen) {
        pairs->full_Q[count] = full[t];
        pairs->target_Q[count] = target[t];
        pairs->slope_Q[count++] = search->slope_T[t];
        now += search->slope_T[t] * (power[t] + other[t]);
    }
    float base = total(now);
    for (int32_t i = 0; i < ours; i++) {
        for (int32_t j = 0; j < theirs; j++) {
            const Lanes *x = pairs->x_IQ + i * count, *y = pairs->y_JQ + j * count;
            Lanes sum = {0};
            for (int32_t q = 0; q < count; q++) {
                Lanes moved = x[q] - y[q];
                sum += pairs->slope_Q[q] *
                       (power8(pairs->full_Q[q] - moved) + power8(pairs->target_Q[q] + ratio * moved));
            }
            pairs->gain_IJ[i * theirs + j] = (base - total(sum)) * (float)search->screen;
        }
    }
}

/* The screen's loads of a server's slots. */
WIDE static void
screen_slots(const Together *search, int32_t server, float speed, Lanes *load_NQ)
{
    const Flow *flow = &search->layer->flow_B[0];
    for (int32_t n = flow->first_S[server]; n < flow->first_S[server + 1]; n++) {
        float part = flow->expert_N[n] == NONE ? 0 : search->share_N[n] / speed;
        const Lanes *load = load_of(search, flow->expert_N[n] == NONE ? 0 : flow->expert_N[n]);
        for (int32_t t = search->screen / 2; t < search->vectors; t += search->screen) {
            *load_NQ++ = part * load[t];
        }
    }
}

/* Swaps of a slot of the hot server with one of a target: the most promising first, because others then need not be
 * evaluated. */
static void
try_swaps(Together *search, int32_t hot, int32_t b, Move *best)
{
    const Flow *flow = &search->layer->flow_B[0];
    int32_t first = flow->first_S[hot], ours = flow->first_S[hot + 1] - first;
    int32_t start = flow->first_S[b], theirs = flow->first_S[b + 1] - start;
    float price = (float)search->price;
    screen_slots(search, b, (float)search->layer->speed_S[hot], search->pairs.y_JQ);
    screen_swaps(search, hot, b, ours, theirs);
    for (int32_t i = 0; i < ours; i++) {
        int32_t e = flow->expert_N[first + i];
        bool never = !(search->all_N[first + i] > best->gain) || has(search, b, e);
        int32_t loads = never ? 0 : !was_held(search, b, e) - !was_held(search, hot, e);
        for (int32_t j = 0; j < theirs; j++) {
            int32_t f = flow->expert_N[start + j];
            float *gain = search->pairs.gain_IJ + i * theirs + j;
            int32_t more = f == NONE ? 0 : !was_held(search, hot, f) - !was_held(search, b, f);
            *gain = never || (f != NONE && has(search, hot, f)) ? -INFINITY : *gain - price * (float)(loads + more);
        }
    }
    for (;;) {
        int32_t most = 0;
        for (int32_t k = 1; k < ours * theirs; k++) {
            most = search->pairs.gain_IJ[k] > search->pairs.gain_IJ[most] ? k : most;
        }
        if (ours * theirs == 0 || !(search->pairs.gain_IJ[most] > best->gain * DOUBT)) {
            return;
        }
        search->pairs.gain_IJ[most] = -INFINITY;
        Move move = {first + most / theirs, start + most % theirs, NONE, true, 0};
        int32_t e = flow->expert_N[move.from], f = flow->expert_N[move.to], other = f == NONE ? e : f;
        float x = search->share_N[move.from], y = f == NONE ? 0 : search->share_N[move.to];
        move.gain = -price * (float)loads_of(search, &move) - change(search, hot, e, -x, other, y);
        move.gain -= change(search, b, e, x, other, -y);
        *best = move.gain > best->gain ? move : *best;
    }
}

/* A half of a hot slot's load in the place of a target's spare replica. */
static void
try_halves(const Together *search, int32_t hot, int32_t b, float most, Move *best)
{
    const Flow *flow = &search->layer->flow_B[0];
    for (int32_t to = flow->first_S[b]; to < flow->first_S[b + 1]; to++) {
        if (!(most > best->gain)) {
            return;
        }
        int32_t f = flow->expert_N[to], heir;
        float y = f == NONE ? 0 : search->share_N[to], drop = find_heir(search, hot, to, &heir);
        if (f != NONE && heir == NONE) {
            continue;
        }
        for (int32_t from = flow->first_S[hot]; from < flow->first_S[hot + 1]; from++) {
            int32_t e = flow->expert_N[from], other = f == NONE ? e : f;
            if (!(-search->half_N[from] - drop > best->gain) || has(search, b, e)) {
                continue;
            }
            Move move = {from, to, heir, false, 0};
            float half = search->share_N[from] / 2;
            move.gain = -search->half_N[from] - drop - (float)(search->price * loads_of(search, &move));
            if (move.gain > best->gain &&
                move.gain - change_by(search, search->screen, b, e, half, other, -y) > best->gain * DOUBT) {
                move.gain -= change(search, b, e, half, other, -y);
                *best = move.gain > best->gain ? move : *best;
            }
        }
    }
}

/* How full servers are while the hot one is. */
WIDE static void
find_cool(Together *search, int32_t hot)
{
    const Lanes *own = full_of(search, hot), *power = search->power_ST + (size_t)hot * (size_t)search->vectors;
    for (int32_t t = 0; t < search->vectors; t++) {
        search->hot_T[t] = search->slope_T[t] * power[t] / (own[t] + TINY);
    }
    for (int32_t s = 0; s < search->layer->servers; s++) {
        const Lanes *full = full_of(search, s);
        Lanes sum = {0};
        for (int32_t t = 0; t < search->vectors; t++) {
            sum += search->hot_T[t] * full[t];
        }
        search->cool_S[s] = total(sum);
    }
}

static Move
best_move(Together *search, int32_t hot)
{
    const Flow *flow = &search->layer->flow_B[0];
    Move best = {NONE, NONE, NONE, false, 0};
    float half = 0;
    for (int32_t n = flow->first_S[hot]; n < flow->first_S[hot + 1]; n++) {
        int32_t e = flow->expert_N[n];
        search->half_N[n] = e == NONE ? 0 : change(search, hot, e, -search->share_N[n] / 2, e, 0);
        search->all_N[n] = e == NONE ? -1 : -change(search, hot, e, -search->share_N[n], e, 0);
        half = -search->half_N[n] > half ? -search->half_N[n] : half;
    }
    screen_slots(search, hot, (float)search->layer->speed_S[hot], search->pairs.x_IQ);
    find_cool(search, hot);
    int32_t cool[TARGETS], count = 0;
    for (int32_t s = 0; s < search->layer->servers; s++) {
        if (s == hot || (count == TARGETS && !(search->cool_S[s] < search->cool_S[cool[count - 1]]))) {
            continue;
        }
        int32_t k = count < TARGETS ? count++ : count - 1;
        for (; k > 0 && search->cool_S[s] < search->cool_S[cool[k - 1]]; k--) {
            cool[k] = cool[k - 1];
        }
        cool[k] = s;
    }
    for (int32_t k = 0; k < count; k++) {
        try_swaps(search, hot, cool[k], &best);
        try_halves(search, hot, cool[k], half, &best);
    }
    return best;
}

static void
put(Together *search, int32_t slot, int32_t expert, float share)
{
    flow_put(&search->layer->flow_B[0], slot, expert);
    search->has_SE[(size_t)search->layer->flow_B[0].server_N[slot] * (size_t)search->layer->experts + (size_t)expert] = 1;
    search->share_N[slot] = share;
    add_load(search, search->layer->flow_B[0].server_N[slot], expert, share);
}

static float
take(Together *search, int32_t slot)
{
    const Flow *flow = &search->layer->flow_B[0];
    float share = search->share_N[slot];
    add_load(search, flow->server_N[slot], flow->expert_N[slot], -share);
    search->has_SE[(size_t)flow->server_N[slot] * (size_t)search->layer->experts + (size_t)flow->expert_N[slot]] = 0;
    flow_take(&search->layer->flow_B[0], slot);
    search->share_N[slot] = 0;
    return share;
}

static void
make_move(Together *search, const Move *move)
{
    const Flow *flow = &search->layer->flow_B[0];
    int32_t e = flow->expert_N[move->from], f = flow->expert_N[move->to];
    float y = f == NONE ? 0 : take(search, move->to), x = take(search, move->from);
    if (move->swap) {
        put(search, move->to, e, x);
        if (f != NONE) {
            put(search, move->from, f, y);
        }
    } else {
        if (f != NONE) {
            search->share_N[move->heir] += y;
            add_load(search, flow->server_N[move->heir], f, y);
        }
        put(search, move->from, e, x / 2);
        put(search, move->to, e, x / 2);
    }
    level_expert(search, e);
    if (f != NONE) {
        level_expert(search, f);
    }
}

void
begin_together(Together *search)
{
    const Layer *layer = search->layer;
    const Flow *flow = &layer->flow_B[0];
    memset(search->stuck_S, 0, (size_t)layer->servers);
    memset(search->dirty_S, 1, (size_t)layer->servers);
    memset(search->has_SE, 0, (size_t)layer->servers * (size_t)layer->experts);
    memset(search->full_ST, 0, (size_t)layer->servers * (size_t)search->vectors * sizeof(Lanes));
    for (int32_t n = 0; n < flow->slots; n++) {
        if (flow->expert_N[n] != NONE) {
            add_load(search, flow->server_N[n], flow->expert_N[n], search->share_N[n]);
            search->has_SE[(size_t)flow->server_N[n] * (size_t)layer->experts + (size_t)flow->expert_N[n]] = 1;
        }
    }
    evaluate(search);
}

double
move_together(Together *search)
{
    const Layer *layer = search->layer;
    const Flow *flow = &layer->flow_B[0];
    start_together(search);
    for (int32_t i = 0; i < MOST_MOVES * flow->slots; i++) {
        Move best = {NONE, NONE, NONE, false, 0};
        for (int32_t k = 0; k < MOST_STUCK && best.from == NONE; k++) {
            int32_t hot = NONE;
            for (int32_t s = 0; s < layer->servers; s++) {
                hot = !search->stuck_S[s] && (hot == NONE || search->heat_S[s] > search->heat_S[hot]) ? s : hot;
            }
            if (hot == NONE) {
                break;
            }
            best = best_move(search, hot);
            search->stuck_S[hot] = best.from == NONE;
        }
        if (best.from == NONE) {
            break;
        }
        search->stuck_S[flow->server_N[best.from]] = search->stuck_S[flow->server_N[best.to]] = 0;
        if (best.heir != NONE) {
            search->stuck_S[flow->server_N[best.heir]] = 0;
        }
        make_move(search, &best);
        evaluate(search);
        if (i % LEVEL_EVERY == LEVEL_EVERY - 1) {
            level_all(search, 1);
        }
    }
    level_all(search, LAST_SWEEPS);
    return search->value;
}

size_t
together_bytes(int32_t vectors, int32_t servers, int32_t experts, int32_t slots, int32_t most)
{
    size_t t = (size_t)vectors, s = (size_t)servers, e = (size_t)experts;
    size_t m = (size_t)most, q = t; /* the screen is not known yet */
    size_t bytes = ((e + 2 * s + 4) * t + (2 * m + 3) * q) * sizeof(Lanes) + m * m * sizeof(float) + (3 * (size_t)slots + 2 * s) * sizeof(float) + 2 * s * (1 + e);
    bytes = (bytes + 7) / 8 * 8 + start_bytes(servers, experts, slots);
    return (bytes + sizeof(Lanes) - 1) / sizeof(Lanes) * sizeof(Lanes);
}

void
together_init(Together *search, void *block, int32_t slots, int32_t most)
{
    size_t t = (size_t)search->vectors, s = (size_t)search->layer->servers, e = (size_t)search->layer->experts;
    search->load_ET = block;
    search->weight_T = search->load_ET + e * t;
    search->full_ST = search->weight_T + t;
    search->power_ST = search->full_ST + s * t;
    search->sum_T = search->power_ST + s * t;
    search->slope_T = search->sum_T + t;
    search->hot_T = search->slope_T + t;
    Pairs *pairs = &search->pairs;
    pairs->full_Q = search->hot_T + t;
    pairs->target_Q = pairs->full_Q + t;
    pairs->slope_Q = pairs->target_Q + t;
    pairs->x_IQ = pairs->slope_Q + t;
    pairs->y_JQ = pairs->x_IQ + (size_t)most * t;
    pairs->gain_IJ = (float *)(pairs->y_JQ + (size_t)most * t);
    search->share_N = pairs->gain_IJ + (size_t)most * (size_t)most;
    search->half_N = search->share_N + slots;
    search->all_N = search->half_N + slots;
    search->heat_S = search->all_N + slots;
    search->cool_S = search->heat_S + s;
    search->stuck_S = (uint8_t *)(search->cool_S + s);
    search->dirty_S = search->stuck_S + s;
    search->has_SE = search->dirty_S + s;
    search->held_SE = search->has_SE + s * e;
    search->start_block = (char *)block + ((size_t)((char *)(search->held_SE + s * e) - (char *)block) + 7) / 8 * 8;
    search->screen = search->vectors >= SCREEN_FROM ? SCREEN : 1;
}
