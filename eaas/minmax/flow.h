/* Min-max flow: assigns the load of experts to servers that hold them, minimising the fullness of the fullest
 * server, then of the next, and so on. No Python.
 *
 * Letters: E experts, S servers, N slots. Slots first_S[s] .. first_S[s + 1] - 1 are those of server s; those that
 * hold the same expert are linked (head_E, next_N). A server's fullness is its load over its speed. The
 * caller checks that indices are in range and that no server holds an expert twice.
 */
#ifndef EAAS_MINMAX_FLOW_H
#define EAAS_MINMAX_FLOW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NONE (-1)

typedef struct {
    int32_t servers, experts, slots;
    const int32_t *first_S; /* S + 1 */
    int32_t *expert_N;      /* NONE: free */
    int32_t *server_N;
    int32_t *next_N;
    int32_t *head_E;
    double *flow_N;  /* load of the slot's expert on this server */
    double *load_S;  /* total load of the server, fixed load included */
    const double *speed_S;
    /* Scratch. */
    double *room_S;
    int32_t *level_S, *queue_S, *now_S, *then_N;
    int32_t farthest; /* level of the servers with capacity */
    uint8_t *seen_E, *settled_S;
    uint8_t *tight_S; /* servers that determine the level: see flow_level */
} Flow;

/* Bytes of a flow's arrays, without first_S and speed_S. */
size_t flow_bytes(int32_t servers, int32_t experts, int32_t slots);

/* Place the arrays in a block of flow_bytes(), aligned for doubles. All slots are free, all loads 0. */
void flow_init(Flow *flow, void *block, int32_t servers, int32_t experts, const int32_t *first_S,
               const double *speed_S);

/* Put an expert into a free slot, or remove it; its flow there becomes 0. */
void flow_put(Flow *flow, int32_t slot, int32_t expert);
void flow_take(Flow *flow, int32_t slot);

/* Shift load between replicas until the fullness of the fullest server is minimal, and return it: a proven lower
 * bound, exceeded by no server by more than a part `slack` (1e-9: exact). Starts with the current flow; a near one is
 * cheaper. tight_S then marks the servers that determine the fullness: no other server can take their load. None is
 * marked if all servers are equally full. The other servers are levelled, too, with `all_levels`.
 *
 * Discrete Newton iteration over Dinic's algorithm: the level starts at the mean, which is a lower bound. Servers above
 * it send their excess to servers below it. If they cannot, the level is at least the mean of the reached servers, and
 * is raised to that. */
double flow_level(Flow *flow, double slack, bool all_levels);

/* One step: send the excess of servers above a level (by more than a part `slack`) to servers below it, and return
 * the rest. Then level_S is 0 for servers with excess, more for servers reached from them (none is below the level),
 * and NONE for others. */
double flow_push(Flow *flow, double level, double slack);

#endif
