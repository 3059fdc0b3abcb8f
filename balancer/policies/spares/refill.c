/* Fills many spare slots at once, as an alias table is filled (A. J. Walker 1974): with S servers and a spare slot
 * each, every load can be divided evenly as long as experts are hot enough.
 */
#include "spares.h"

#include <string.h>

#define MUCH 0.01 /* part of the load; with less above the mean, single exchanges are enough */

void
give_back(Flow *flow, int32_t slot)
{
    int32_t expert = flow->expert_N[slot], server = flow->server_N[slot];
    double left = flow->flow_N[slot];
    flow->load_S[server] -= left;
    flow->room_S[server] += left;
    flow_take(flow, slot);
    for (int32_t n = flow->head_E[expert]; left > 0 && n != NONE; n = flow->next_N[n]) {
        int32_t t = flow->server_N[n];
        double room = flow->room_S[t] > 0 ? flow->room_S[t] : 0;
        double given = flow->next_N[n] == NONE || room > left ? left : room;
        flow->flow_N[n] += given;
        flow->load_S[t] += given;
        flow->room_S[t] -= given;
        left -= given;
    }
}

/* The slot with the most flow on servers above the mean, of an expert that `server` does not hold; or NONE. */
static int32_t
hottest_piece(const Flow *flow, int32_t server)
{
    int32_t best = NONE;
    double most = 0;
    for (int32_t s = 0; s < flow->servers; s++) {
        for (int32_t n = flow->first_S[s]; flow->room_S[s] < 0 && n < flow->first_S[s + 1]; n++) {
            if (flow->expert_N[n] != NONE && flow->flow_N[n] > most && !is_held(flow, server, flow->expert_N[n])) {
                most = flow->flow_N[n];
                best = n;
            }
        }
    }
    return best;
}

/* The server with an empty slot and the most room, at least `least`; or NONE. */
static int32_t
roomiest(const Spares *spares, const Flow *flow, double least)
{
    int32_t best = NONE;
    for (int32_t s = 0; s < spares->servers; s++) {
        if (spares->empty_S[s] && flow->room_S[s] > least) {
            least = flow->room_S[s];
            best = s;
        }
    }
    return best;
}

void
refill_spares(Spares *spares)
{
    Flow *flow = &spares->flow_B[spares->scenarios];
    double mean = spares->mean_B[spares->scenarios], least = spares->least * mean;
    if (flow_push(flow, mean, SLACK) <= MUCH * mean * spares->servers) {
        return;
    }
    for (int32_t s = 0; s < spares->servers; s++) {
        int32_t slot = spare_slot(spares, s);
        spares->empty_S[s] = spares->open_S[s] && !(flow->expert_N[slot] != NONE && flow->flow_N[slot] > least);
        if (spares->empty_S[s] && flow->expert_N[slot] != NONE) {
            give_back(flow, slot);
        }
    }
    flow_push(flow, mean, SLACK);
    for (;;) {
        int32_t server = roomiest(spares, flow, least);
        int32_t piece = server == NONE ? NONE : hottest_piece(flow, server);
        if (piece == NONE) {
            return;
        }
        int32_t from = flow->server_N[piece], slot = spare_slot(spares, server), expert = flow->expert_N[piece];
        double moved = flow->flow_N[piece] < flow->room_S[server] ? flow->flow_N[piece] : flow->room_S[server];
        /* A server that still has its own slot to fill may give more than its excess. */
        if (!spares->empty_S[from] && moved > -flow->room_S[from]) {
            moved = -flow->room_S[from];
        }
        spares->empty_S[server] = 0;
        flow_put(flow, slot, expert);
        flow->flow_N[piece] -= moved;
        flow->flow_N[slot] += moved;
        flow->room_S[from] += moved;
        flow->room_S[server] -= moved;
        for (int32_t b = 0; b < spares->scenarios; b++) {
            if (spares->flow_B[b].expert_N[slot] != NONE) {
                flow_take(&spares->flow_B[b], slot);
            }
            flow_put(&spares->flow_B[b], slot, expert);
        }
    }
}
