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

#define MOST_STUCK 8     /* hottest servers without a move that pays, after which the search ends */
#define MOST_MOVES 2     /* per slot */
#define LEVEL_EVERY 16   /* moves between two passes over all shares */
#define LAST_SWEEPS 2

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

WIDE void
renew_powers(Together *search)
{
    int32_t count = search->vectors;
    for (int32_t s = 0; s < search->layer->servers; s++) {
        if (search->dirty_S[s]) {
            const Lanes *full = full_of(search, s);
            Lanes *power = search->power_ST + (size_t)s * (size_t)count;
            for (int32_t t = 0; t < count; t++) {
                power[t] = power8(full[t]);
            }
            search->dirty_S[s] = 0;
        }
    }
}

WIDE void
evaluate(Together *search)
{
    int32_t count = search->vectors, servers = search->layer->servers;
    for (int32_t t = 0; t < count; t++) {
        search->sum_T[t] = (Lanes){0} + TINY;
    }
    renew_powers(search);
    for (int32_t s = 0; s < servers; s++) {
        const Lanes *power = search->power_ST + (size_t)s * (size_t)count;
        for (int32_t t = 0; t < count; t++) {
            search->sum_T[t] += power[t];
        }
    }
    Lanes value = {0};
    for (int32_t t = 0; t < count; t++) {
        Lanes root = root8(search->sum_T[t]);
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

void
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

void
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
}
