/* The min-max flow: the load of experts onto servers that hold them, such that the fullest server is as little full
 * as it can be; then the next, and so on. No Python in here.
 *
 * Letters: E experts, S servers, N slots. Slots first_S[s] .. first_S[s + 1] - 1 are those of server s; those that
 * hold the same expert are linked (head_E, next_N). A server's fullness is its load over its speed. Nothing is
 * checked here: whoever calls has seen to it that no index is out of range and no server holds an expert twice.
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
    double *flow_N;  /* load of the slot's expert that the server takes there */
    double *load_S;  /* all that the server takes, with what cannot be moved */
    const double *speed_S;
    /* Scratch. */
    double *room_S;
    int32_t *level_S, *queue_S, *now_S, *then_N;
    int32_t farthest; /* level of the servers with room */
    uint8_t *seen_E, *settled_S;
    uint8_t *tight_S; /* servers that hold the level up: see flow_level */
} Flow;

/* Bytes that a flow's arrays take, without first_S and speed_S. */
size_t flow_bytes(int32_t servers, int32_t experts, int32_t slots);

/* Lays the arrays over a block of flow_bytes(), aligned for doubles. Every slot is free then, every load 0. */
void flow_init(Flow *flow, void *block, int32_t servers, int32_t experts, const int32_t *first_S,
               const double *speed_S);

/* An expert into a free slot, or out of it; its flow there is 0 then. */
void flow_put(Flow *flow, int32_t slot, int32_t expert);
void flow_take(Flow *flow, int32_t slot);

/* Shifts load between the replicas of experts until the fullest server is as little full as it can be, and returns
 * that fullness: a proven lower bound, which no server is above by more than `slack` of it (1e-9: exact). It begins at
 * the flow that there is: the nearer that is, the cheaper. tight_S then marks the servers that hold the fullness up:
 * what they take, no other server can take from them; none, where all servers are equally full. What the other
 * servers take is as it comes, or levelled too, down to the last, with `all_levels`.
 *
 * Discrete Newton iteration over Dinic's algorithm: the level begins at the mean, which is a lower bound; servers above
 * it send what is too much to servers below it; where they cannot, the servers that were reached are a proof that the
 * level is at least their own mean, and it is raised to that. */
double flow_level(Flow *flow, double slack, bool all_levels);

/* One step of that: sends what servers have above a level (by more than `slack` of it) to servers below it, as far as
 * it goes, and returns what could not be sent. level_S is NONE then, but for the servers that still have too much (0)
 * and those that can be reached from them (more), none of which is below the level. */
double flow_push(Flow *flow, double level, double slack);

#endif
