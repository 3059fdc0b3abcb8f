/* The moves of together.c: what a hot server's load can do elsewhere, and by how much the objective changes. */
#include <math.h>

#include "together.h"

#define LEAST 1e-4f /* a move lowers the objective by this at least */
#define EQUAL 2e-3f /* layouts that differ so little for each load are equally good */
#define EVALUATE_EVERY 16 /* swaps that return experts */
#define STEPS 12 /* of a bisection */
#define DOUBT 0.6f /* a first estimate, by `screen` vectors, may be so much of the gain, or more */

/* Change of the objective, by the first `vectors`, if a server gets `one` parts of an expert's load and `two` of
 * another's. */
WIDE static float
change_by(const Together *search, int32_t vectors, int32_t server, int32_t expert, float one, int32_t other, float two)
{
    const Lanes *full = full_of(search, server), *load = load_of(search, expert), *more = load_of(search, other);
    const Lanes *power = search->power_ST + (size_t)server * (size_t)search->vectors;
    float speed = (float)search->layer->speed_S[server];
    Lanes sum = {0};
    one /= speed;
    two /= speed;
    for (int32_t t = 0; t < vectors; t++) {
        sum += search->slope_T[t] * (power8(full[t] + one * load[t] + two * more[t]) - power[t]);
    }
    return total(sum);
}

static float
change(const Together *search, int32_t server, int32_t expert, float one, int32_t other, float two)
{
    return change_by(search, search->vectors, server, expert, one, other, two);
}

/* ... by the screen's vectors. */
static float
change_about(const Together *search, int32_t server, int32_t expert, float one, int32_t other, float two)
{
    return change_by(search, search->screen, server, expert, one, other, two) * search->scale;
}

/* What the objective loses if a slot of the hot server gives away a half of its load, or all. */
WIDE static void
find_losses(Together *search, int32_t hot, int32_t slot)
{
    int32_t e = search->layer->flow_B[0].expert_N[slot];
    search->half_N[slot] = search->all_N[slot] = 0;
    if (e == NONE) {
        return;
    }
    const Lanes *full = full_of(search, hot), *load = load_of(search, e);
    const Lanes *power = search->power_ST + (size_t)hot * (size_t)search->vectors;
    float part = search->share_N[slot] / (float)search->layer->speed_S[hot];
    Lanes half = {0}, all = {0};
    for (int32_t t = 0; t < search->vectors; t++) {
        Lanes moved = part * load[t];
        half += search->slope_T[t] * (power[t] - power8(full[t] - moved / 2));
        all += search->slope_T[t] * (power[t] - power8(full[t] - moved));
    }
    search->half_N[slot] = total(half);
    search->all_N[slot] = total(all);
}

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

/* The other replica that takes over at the least cost, a first estimate; none of the hot server, which changes, too. */
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
            float cost = change_about(search, flow->server_N[m], e, search->share_N[slot], e, 0);
            if (cost < least) {
                least = cost;
                *heir = m;
            }
        }
    }
    return least;
}

/* Loads of a server's slots in the screen's vectors, over the hot server's speed, times root_Q. */
WIDE static void
screen_slots(const Together *search, int32_t server, float speed, Lanes *load_NQ)
{
    const Flow *flow = &search->layer->flow_B[0];
    for (int32_t n = flow->first_S[server]; n < flow->first_S[server + 1]; n++) {
        float part = flow->expert_N[n] == NONE ? 0 : search->share_N[n] / speed;
        const Lanes *load = load_of(search, flow->expert_N[n] == NONE ? 0 : flow->expert_N[n]);
        for (int32_t q = 0; q < search->screen; q++) {
            *load_NQ++ = search->pairs.root_Q[q] * part * load[q];
        }
    }
}

/* Which slots of the hot server may change places with which of a target's, into pair_P; fills cost_P, the price of what
 * the swap loads. Returns their number, and copies of the last up to a multiple of BLOCK. `least`: swaps that gain no
 * more are left out. */
static int32_t
list_pairs(Together *search, int32_t hot, int32_t b, float least)
{
    const Flow *flow = &search->layer->flow_B[0];
    Pairs *pairs = &search->pairs;
    int32_t first = flow->first_S[hot], ours = flow->first_S[hot + 1] - first, count = 0;
    int32_t start = flow->first_S[b], theirs = flow->first_S[b + 1] - start;
    float price = (float)search->price;
    for (int32_t j = 0; j < theirs; j++) {
        int32_t f = flow->expert_N[start + j];
        int32_t loads = f == NONE ? 0 : !was_held(search, hot, f) - !was_held(search, b, f);
        pairs->cost_J[j] = f != NONE && has(search, hot, f) ? INFINITY : price * (float)loads;
    }
    for (int32_t i = 0; i < ours; i++) {
        int32_t e = flow->expert_N[first + i];
        if (!(search->all_N[first + i] > least) || has(search, b, e)) {
            continue;
        }
        float cost = price * (float)(!was_held(search, b, e) - !was_held(search, hot, e));
        for (int32_t j = 0; j < theirs; j++) {
            /* Without a branch. */
            pairs->pair_P[count] = (Pair){i, j};
            pairs->cost_P[count] = cost + pairs->cost_J[j];
            count += pairs->cost_J[j] < INFINITY;
        }
    }
    for (int32_t p = count; p % BLOCK > 0; p++) {
        pairs->pair_P[p] = pairs->pair_P[count - 1];
    }
    return count;
}

/* First estimates of the gains of swaps with a target, those of list_pairs, less the price; adds them to the promises. */
WIDE static void
screen_swaps(Together *search, int32_t hot, int32_t b)
{
    const Flow *flow = &search->layer->flow_B[0];
    Pairs *pairs = &search->pairs;
    int32_t count = search->screen, size = list_pairs(search, hot, b, pairs->top * DOUBT);
    const Lanes *target = full_of(search, b), *slope = search->slope_T;
    const Lanes *power = search->power_ST + (size_t)hot * (size_t)search->vectors;
    const Lanes *other = search->power_ST + (size_t)b * (size_t)search->vectors;
    Lanes ratio = (Lanes){0} + (float)(search->layer->speed_S[hot] / search->layer->speed_S[b]), now = {0};
    for (int32_t q = 0; q < count; q++) {
        now += slope[q] * (power[q] + other[q]);
        pairs->target_Q[q] = pairs->root_Q[q] * target[q];
    }
    float base = total(now);
    screen_slots(search, b, (float)search->layer->speed_S[hot], pairs->y_JQ);
    for (int32_t p = 0; p < size; p += BLOCK) {
        const Lanes *x[BLOCK], *y[BLOCK];
        Lanes sum[BLOCK] = {{0}};
        for (int32_t i = 0; i < BLOCK; i++) {
            x[i] = pairs->x_IQ + pairs->pair_P[p + i].ours * count;
            y[i] = pairs->y_JQ + pairs->pair_P[p + i].theirs * count;
        }
        for (int32_t q = 0; q < count; q++) {
            for (int32_t i = 0; i < BLOCK; i++) {
                Lanes moved = x[i][q] - y[i][q];
                sum[i] += power8(pairs->full_Q[q] - moved) + power8(pairs->target_Q[q] + ratio * moved);
            }
        }
        for (int32_t i = 0; i < BLOCK; i++) {
            pairs->gain_P[p + i] = (base - total(sum[i])) * search->scale;
        }
    }
    int32_t first = flow->first_S[hot], start = flow->first_S[b];
    for (int32_t p = 0; p < size; p++) {
        float gain = pairs->gain_P[p] - pairs->cost_P[p];
        if (gain > pairs->top * DOUBT) {
            pairs->top = gain > pairs->top ? gain : pairs->top;
            pairs->promise_K[pairs->promises++] =
                (Move){first + pairs->pair_P[p].ours, start + pairs->pair_P[p].theirs, NONE, true, gain};
        }
    }
}

static float
swap_gain(const Together *search, const Move *move, float price)
{
    const Flow *flow = &search->layer->flow_B[0];
    int32_t hot = flow->server_N[move->from], b = flow->server_N[move->to];
    int32_t e = flow->expert_N[move->from], f = flow->expert_N[move->to], other = f == NONE ? e : f;
    float x = search->share_N[move->from], y = f == NONE ? 0 : search->share_N[move->to];
    float gain = -price * (float)loads_of(search, move) - change(search, hot, e, -x, other, y);
    return gain - change(search, b, e, x, other, -y);
}

/* Swaps of a slot of the hot server with one of a target: the most promising first, because others then need not be
 * evaluated. */
static void
try_swaps(Together *search, int32_t hot, const int32_t *cool, int32_t targets, Move *best)
{
    Pairs *pairs = &search->pairs;
    const Lanes *full = full_of(search, hot);
    for (int32_t q = 0; q < search->screen; q++) {
        pairs->root_Q[q] = root8(search->slope_T[q]);
        pairs->full_Q[q] = pairs->root_Q[q] * full[q];
    }
    screen_slots(search, hot, (float)search->layer->speed_S[hot], pairs->x_IQ);
    pairs->top = 0;
    pairs->promises = 0;
    for (int32_t k = 0; k < targets; k++) {
        screen_swaps(search, hot, cool[k]);
    }
    while (pairs->promises > 0) {
        int32_t most = 0;
        for (int32_t k = 1; k < pairs->promises; k++) {
            most = pairs->promise_K[k].gain > pairs->promise_K[most].gain ? k : most;
        }
        Move move = pairs->promise_K[most];
        if (!(move.gain > best->gain * DOUBT)) {
            return;
        }
        pairs->promise_K[most] = pairs->promise_K[--pairs->promises];
        if (search->all_N[move.from] > best->gain) {
            move.gain = swap_gain(search, &move, (float)search->price);
            *best = move.gain > best->gain ? move : *best;
        }
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
        if ((f != NONE && heir == NONE) || !(most - drop > best->gain * DOUBT)) {
            continue;
        }
        if (f != NONE) {
            drop = change(search, flow->server_N[heir], f, y, f, 0);
        }
        for (int32_t from = flow->first_S[hot]; from < flow->first_S[hot + 1]; from++) {
            int32_t e = flow->expert_N[from], other = f == NONE ? e : f;
            if (!(search->half_N[from] - drop > best->gain) || has(search, b, e)) {
                continue;
            }
            Move move = {from, to, heir, false, 0};
            float half = search->share_N[from] / 2;
            move.gain = search->half_N[from] - drop - (float)(search->price * loads_of(search, &move));
            if (move.gain > best->gain &&
                move.gain - change_about(search, b, e, half, other, -y) > best->gain * DOUBT) {
                move.gain -= change(search, b, e, half, other, -y);
                *best = move.gain > best->gain ? move : *best;
            }
        }
    }
}

/* How full servers are while the hot one is, by the screen's vectors. */
WIDE static void
find_cool(Together *search, int32_t hot)
{
    const Lanes *own = full_of(search, hot), *power = search->power_ST + (size_t)hot * (size_t)search->vectors;
    for (int32_t t = 0; t < search->screen; t++) {
        search->hot_T[t] = search->slope_T[t] * power[t] / (own[t] + TINY);
    }
    for (int32_t s = 0; s < search->layer->servers; s++) {
        const Lanes *full = full_of(search, s);
        Lanes sum = {0};
        for (int32_t t = 0; t < search->screen; t++) {
            sum += search->hot_T[t] * full[t];
        }
        search->cool_S[s] = total(sum);
    }
}

/* How many servers are less full than a limit. */
WIDE static int32_t
count_cooler(const Together *search, float limit)
{
    int32_t count = 0;
    for (int32_t s = 0; s < search->layer->servers; s++) {
        count += search->cool_S[s] < limit;
    }
    return count;
}

/* The servers that are least full, TARGETS at most; returns their number. */
static int32_t
coolest(Together *search, int32_t hot, int32_t *cool)
{
    search->cool_S[hot] = INFINITY;
    float low = INFINITY, high = 0;
    for (int32_t s = 0; s < search->layer->servers; s++) {
        low = search->cool_S[s] < low ? search->cool_S[s] : low;
        high = s != hot && search->cool_S[s] > high ? search->cool_S[s] : high;
    }
    /* A limit with TARGETS below it, by bisection, because a sort's branches are mispredicted. */
    high = nextafterf(high, INFINITY);
    for (int32_t i = 0; search->layer->servers > TARGETS + 1 && i < STEPS; i++) {
        float middle = low + (high - low) / 2;
        int32_t below = count_cooler(search, middle);
        if (below == TARGETS) {
            high = middle;
            break;
        }
        low = below < TARGETS ? middle : low;
        high = below < TARGETS ? high : middle;
    }
    int32_t count = 0;
    for (int32_t s = 0; s < search->layer->servers && count < TARGETS; s++) {
        cool[count] = s;
        count += search->cool_S[s] < high;
    }
    return count;
}

Move
best_move(Together *search, int32_t hot)
{
    const Flow *flow = &search->layer->flow_B[0];
    Move best = {NONE, NONE, NONE, false, LEAST};
    float half = 0;
    for (int32_t n = flow->first_S[hot]; n < flow->first_S[hot + 1]; n++) {
        find_losses(search, hot, n);
        half = search->half_N[n] > half ? search->half_N[n] : half;
    }
    find_cool(search, hot);
    int32_t cool[TARGETS], count = coolest(search, hot, cool);
    try_swaps(search, hot, cool, count, &best);
    for (int32_t k = 0; k < count; k++) {
        try_halves(search, hot, cool[k], half, &best);
    }
    return best;
}

/* The swap by which a server gets back an expert that it held, if that pays; `from` is NONE if none does. */
static Move
return_of(const Together *search, int32_t server, int32_t expert)
{
    const Flow *flow = &search->layer->flow_B[0];
    float price = search->price > EQUAL ? (float)search->price : EQUAL;
    Move best = {NONE, NONE, NONE, true, 0};
    for (int32_t m = flow->head_E[expert]; m != NONE; m = flow->next_N[m]) {
        int32_t b = flow->server_N[m];
        for (int32_t n = flow->first_S[server]; !was_held(search, b, expert) && n < flow->first_S[server + 1]; n++) {
            int32_t f = flow->expert_N[n];
            Move move = {m, n, NONE, true, 0};
            if (f == NONE || was_held(search, server, f) || has(search, b, f)) {
                continue;
            }
            float x = search->share_N[m], y = search->share_N[n];
            move.gain = -price * (float)loads_of(search, &move);
            move.gain -= change_about(search, b, expert, -x, f, y) + change_about(search, server, expert, x, f, -y);
            if (move.gain > best.gain) {
                move.gain = swap_gain(search, &move, price);
                best = move.gain > best.gain ? move : best;
            }
        }
    }
    return best;
}

void
return_all(Together *search)
{
    for (int32_t s = 0, count = 0; s < search->layer->servers; s++) {
        for (int32_t e = 0; e < search->layer->experts; e++) {
            if (!was_held(search, s, e) || has(search, s, e)) {
                continue;
            }
            Move move = return_of(search, s, e);
            if (move.from != NONE) {
                make_move(search, &move);
                renew_powers(search);
                if (++count % EVALUATE_EVERY == 0) {
                    evaluate(search);
                }
            }
        }
    }
    evaluate(search);
}
