/* The moves of together.c: what a hot server's load can do elsewhere, and by how much the objective changes. */
#include <math.h>

#include "together.h"

#define TARGETS 12       /* servers tried for a hot one's load */
#define DOUBT 0.8f       /* ... and may be wrong by a fifth */

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

Move
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
