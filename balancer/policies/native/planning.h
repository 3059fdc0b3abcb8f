/* Loops of the policies that NumPy cannot express. Only module.c and bind_*.c know Python.
 *
 * A placement is compact here: `count` has the replicas of each expert of a layer, and `server` the server of
 * each replica, one expert's after another's; -1 is a replica that found no place.
 */
#ifndef EAAS_POLICIES_PLANNING_H
#define EAAS_POLICIES_PLANNING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "heap.h"
#include "replicate.h"

typedef struct {
    ptrdiff_t experts;
    ptrdiff_t servers;
    const double *load;  /* by expert */
    const double *speed; /* by server */
} Layer;

/* pack.c */
typedef struct {
    float *filled;     /* by server */
    int64_t *held;     /* by server */
    uint64_t *heap;    /* by server */
    uint64_t *order;   /* by replica */
    uint64_t *sorting; /* by replica */
} PackRoom;

void pack(ptrdiff_t servers, const double *value, ptrdiff_t replicas, int64_t slots, int64_t *server, int64_t *place,
          PackRoom *room);
void separate(ptrdiff_t replicas, ptrdiff_t servers, ptrdiff_t experts, const double *value, const int64_t *expert,
              int64_t *server, int64_t *place, uint16_t *held);

/* place.c */
#define PLACE_SERVER_BITS 14 /* servers are below 2 to that */
#define PLACE_EXPERT_BITS 16 /* and experts below 2 to that */

typedef struct {
    double *filled;    /* by server */
    int64_t *left;     /* by server */
    uint64_t *by_load; /* by expert */
    uint64_t *order;   /* by expert */
    uint64_t *sorting; /* by expert */
    uint64_t *heap;    /* by server */
    uint64_t *queue;   /* by server */
    uint8_t *held;     /* servers x experts */
    bool alike;        /* all servers are equally fast */
} PlaceRoom;

void sort_by_load(const Layer *layer, PlaceRoom *room);
void place(const Layer *layer, const int64_t *count, const int64_t *slots, int32_t *server, PlaceRoom *room);

/* refine.c */
typedef struct {
    double *filled;  /* by server */
    Entry *order;    /* by server */
    double *value;   /* by replica */
    int32_t *owner;  /* by replica */
    int32_t *listed; /* by replica: those of server 0, then those of server 1, ... */
    int32_t *start;  /* by server, and the end: where its replicas begin in that list */
    int32_t *next;   /* by server */
} RefineRoom;

void refine(const Layer *layer, const int64_t *count, int32_t *server, int64_t budget, RefineRoom *room);

/* spread.c */
typedef struct {
    int32_t *total;    /* by server */
    int32_t *left;     /* by server */
    int32_t *shared;   /* by server */
    int32_t *taken_by; /* by server */
    int32_t *list;     /* by server */
    int32_t *chosen;   /* by server */
    int32_t *pairs;    /* servers x servers */
} SpreadRoom;

void spread(ptrdiff_t experts, ptrdiff_t servers, const int64_t *count, const int64_t *slots, ptrdiff_t first,
            uint8_t *holds, double *shares, SpreadRoom *room);

/* scalpel.c */
typedef struct {
    int32_t *expert; /* those of server 0, then those of server 1, ...; room for servers x experts */
    int32_t *first;  /* by server, and the end: where its experts begin in that list */
} HeldList;

void list_held(const uint8_t *holds, ptrdiff_t servers, ptrdiff_t experts, HeldList *list);
void count_held(const HeldList *list, ptrdiff_t servers, ptrdiff_t experts, int64_t *count);
int64_t count_new(const uint8_t *holds, const uint8_t *current, ptrdiff_t size);
void server_load(const Layer *layer, const HeldList *list, const double *shares, double *filled);
bool held_load(const Layer *layer, const HeldList *list, const int64_t *count, const int64_t *slots, double *filled);
void equal_shares(const HeldList *list, ptrdiff_t servers, ptrdiff_t experts, const int64_t *count, double *shares);
int64_t swap_hottest(const Layer *layer, uint8_t *holds, int64_t budget, double *filled, double *fullness,
                     int64_t *count, HeldList *list);

/* match.c */
typedef struct {
    int32_t server;
    int32_t common; /* experts that the pack and the server have in common, above 0 */
} Overlap;

typedef struct {
    HeldList held;        /* what each server holds now */
    int32_t *holder;      /* the servers of expert 0, then those of expert 1, ... */
    int32_t *first;       /* by expert, and the end: where its servers begin in that list */
    int32_t *packed;      /* by replica: the experts of pack 0, then those of pack 1, ... */
    int32_t *first_pack;  /* by pack, and the end */
    int32_t *common;      /* by server */
    Overlap *overlap;     /* those of pack 0, then those of pack 1, ...; servers x servers at most */
    int32_t *first_overlap; /* by pack, and the end */
    int32_t *left;        /* by server */
} MatchRoom;

void find_overlaps(ptrdiff_t servers, ptrdiff_t experts, const int64_t *count, const int32_t *server,
                   const uint8_t *current, MatchRoom *room);
void match_greedy(ptrdiff_t servers, const int64_t *kind, int64_t *server_of, MatchRoom *room);
void match_optimal(ptrdiff_t servers, const int64_t *kind, int64_t *server_of, const MatchRoom *room, int32_t *overlap,
                   double *doubles, int64_t *ints);

/* craft.c */
#define LANES 16 /* batches at a time, where there are several */

void replay(const float *load_EB, ptrdiff_t lanes, int wide, ptrdiff_t experts, ptrdiff_t servers, const int64_t *count,
            const int32_t *server, float *filled_SB, double *balancedness);
void allocate(const double *gain_LK, const int64_t *replicas_K, const int64_t *limit_L, ptrdiff_t layers,
              ptrdiff_t choices, int64_t budget, int64_t *chosen_L, double *best_C, double *next_C, int8_t *choice_LC);
void interleave(const int64_t *total_L, const int64_t *slots_LS, ptrdiff_t layers, ptrdiff_t servers,
                int64_t *assigned_LS, int64_t *sum_S, int32_t *tied);

#endif
