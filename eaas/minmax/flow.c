#include "flow.h"

#include <string.h>

/* A server has capacity if it is this far below the level; less is rounding. */
#define ROUNDING 1e-13
/* Precision for servers below the fullest ones, which delay nothing. */
#define BELOW 0.01

size_t
flow_bytes(int32_t servers, int32_t experts, int32_t slots)
{
    size_t s = (size_t)servers, e = (size_t)experts, n = (size_t)slots;
    return (n + 2 * s) * sizeof(double) + (4 * n + 3 * s + e) * sizeof(int32_t) + e + 2 * s;
}

void
flow_init(Flow *flow, void *block, int32_t servers, int32_t experts, const int32_t *first_S, const double *speed_S)
{
    int32_t slots = first_S[servers];
    *flow = (Flow){.servers = servers, .experts = experts, .slots = slots, .first_S = first_S, .speed_S = speed_S};
    flow->flow_N = block;
    flow->load_S = flow->flow_N + slots;
    flow->room_S = flow->load_S + servers;
    flow->expert_N = (int32_t *)(flow->room_S + servers);
    flow->server_N = flow->expert_N + slots;
    flow->next_N = flow->server_N + slots;
    flow->then_N = flow->next_N + slots;
    flow->head_E = flow->then_N + slots;
    flow->level_S = flow->head_E + experts;
    flow->queue_S = flow->level_S + servers;
    flow->now_S = flow->queue_S + servers;
    flow->seen_E = (uint8_t *)(flow->now_S + servers);
    flow->settled_S = flow->seen_E + experts;
    flow->tight_S = flow->settled_S + servers;
    for (int32_t s = 0; s < servers; s++) {
        flow->load_S[s] = flow->room_S[s] = 0;
        for (int32_t n = first_S[s]; n < first_S[s + 1]; n++) {
            flow->server_N[n] = s;
            flow->expert_N[n] = NONE;
            flow->flow_N[n] = 0;
        }
    }
    for (int32_t e = 0; e < experts; e++) {
        flow->head_E[e] = NONE;
    }
}

void
flow_put(Flow *flow, int32_t slot, int32_t expert)
{
    flow->expert_N[slot] = expert;
    flow->next_N[slot] = flow->head_E[expert];
    flow->head_E[expert] = slot;
    flow->flow_N[slot] = 0;
}

void
flow_take(Flow *flow, int32_t slot)
{
    int32_t *link = &flow->head_E[flow->expert_N[slot]];
    while (*link != slot) {
        link = &flow->next_N[*link];
    }
    *link = flow->next_N[slot];
    flow->expert_N[slot] = NONE;
}

/* ---- one phase of Dinic's algorithm, from servers above the level to servers below it ---------------------- */

/* Breadth-first search from every server above the level to the first with capacity. */
static bool
find_room(Flow *flow, double level, double slack)
{
    int32_t filled = 0, found_at = INT32_MAX;
    memset(flow->seen_E, 0, (size_t)flow->experts);
    for (int32_t s = 0; s < flow->servers; s++) {
        double most = level * flow->speed_S[s];
        flow->room_S[s] = most - flow->load_S[s];
        flow->level_S[s] = NONE;
        flow->now_S[s] = flow->first_S[s];
        if (!flow->settled_S[s] && flow->room_S[s] < -slack * most) {
            flow->level_S[s] = 0;
            flow->queue_S[filled++] = s;
        }
    }
    for (int32_t next = 0; next < filled; next++) {
        int32_t s = flow->queue_S[next];
        if (flow->level_S[s] >= found_at) {
            break;
        }
        for (int32_t n = flow->first_S[s]; n < flow->first_S[s + 1]; n++) {
            int32_t e = flow->expert_N[n];
            flow->then_N[n] = e == NONE ? NONE : flow->head_E[e];
            if (e == NONE || flow->seen_E[e] || !(flow->flow_N[n] > 0)) {
                continue;
            }
            flow->seen_E[e] = 1;
            for (int32_t other = flow->head_E[e]; other != NONE; other = flow->next_N[other]) {
                int32_t t = flow->server_N[other];
                if (flow->level_S[t] != NONE || flow->settled_S[t]) {
                    continue;
                }
                flow->level_S[t] = flow->level_S[s] + 1;
                flow->queue_S[filled++] = t;
                if (flow->room_S[t] > ROUNDING * level * flow->speed_S[t]) {
                    found_at = flow->level_S[t];
                }
            }
        }
    }
    flow->farthest = found_at;
    return found_at != INT32_MAX;
}

/* Send up to `amount` of a server's load to later servers; return how much was sent. */
static double
send(Flow *flow, int32_t s, double amount, double level)
{
    double sent = 0;
    if (flow->room_S[s] > ROUNDING * level * flow->speed_S[s]) {
        sent = amount < flow->room_S[s] ? amount : flow->room_S[s];
        flow->room_S[s] -= sent;
        return sent;
    }
    if (flow->level_S[s] == flow->farthest) {
        return 0;
    }
    for (; flow->now_S[s] < flow->first_S[s + 1]; flow->now_S[s]++) {
        int32_t n = flow->now_S[s];
        for (; flow->then_N[n] != NONE && flow->flow_N[n] > 0; flow->then_N[n] = flow->next_N[flow->then_N[n]]) {
            int32_t other = flow->then_N[n], t = flow->server_N[other];
            if (flow->level_S[t] != flow->level_S[s] + 1) {
                continue;
            }
            double wanted = amount - sent, most = wanted < flow->flow_N[n] ? wanted : flow->flow_N[n];
            double went = send(flow, t, most, level);
            flow->flow_N[n] -= went;
            flow->flow_N[other] += went;
            sent += went;
            /* Compare with the amount, because the difference may never become 0. */
            if (went == wanted) {
                return amount;
            }
        }
    }
    return sent;
}

static void
send_all(Flow *flow, double level)
{
    for (int32_t s = 0; s < flow->servers; s++) {
        if (flow->level_S[s] == 0) {
            double wanted = -flow->room_S[s];
            flow->room_S[s] = send(flow, s, wanted, level) - wanted;
        }
    }
    for (int32_t s = 0; s < flow->servers; s++) {
        if (flow->level_S[s] != NONE) {
            flow->load_S[s] = level * flow->speed_S[s] - flow->room_S[s];
        }
    }
}

double
flow_push(Flow *flow, double level, double slack)
{
    while (find_room(flow, level, slack)) {
        send_all(flow, level);
    }
    double left = 0;
    for (int32_t s = 0; s < flow->servers; s++) {
        left -= flow->level_S[s] == 0 ? flow->room_S[s] : 0;
    }
    return left;
}

/* ---- the level ---------------------------------------------------------------------------------------------- */

typedef enum { UNSETTLED, REACHED } Which;

static double
mean_fullness(const Flow *flow, Which which)
{
    double load = 0, speed = 0;
    for (int32_t s = 0; s < flow->servers; s++) {
        if (which == REACHED ? flow->level_S[s] != NONE : !flow->settled_S[s]) {
            load += flow->load_S[s];
            speed += flow->speed_S[s];
        }
    }
    return speed > 0 ? load / speed : 0;
}

double
flow_level(Flow *flow, double slack, bool all_levels)
{
    double first = -1;
    memset(flow->settled_S, 0, (size_t)flow->servers);
    memset(flow->tight_S, 0, (size_t)flow->servers);
    for (;;) {
        double level = mean_fullness(flow, UNSETTLED);
        bool raised = false;
        for (;;) {
            flow_push(flow, level, slack);
            double proven = mean_fullness(flow, REACHED);
            /* Not above it if no server was reached, or by rounding. */
            if (!(proven > level)) {
                break;
            }
            level = proven;
            raised = true;
            for (int32_t s = 0; s < flow->servers; s++) {
                flow->tight_S[s] = flow->level_S[s] != NONE;
            }
        }
        first = first < 0 ? level : first;
        if (!all_levels || !raised) {
            return first;
        }
        slack = slack < BELOW ? BELOW : slack;
        for (int32_t s = 0; s < flow->servers; s++) {
            flow->settled_S[s] |= flow->tight_S[s];
        }
    }
}
