/* The loops of the policies that numpy has no words for. No Python in these files but module.c and bind_*.c.
 *
 * A placement is compact here: `count` has the replicas of each expert of a layer, and `server` the server of
 * each replica, one expert's after another's; -1 is a replica that found no place.
 */
#ifndef EAAS_POLICIES_PLANNING_H
#define EAAS_POLICIES_PLANNING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The smallest key first, of equal ones the smallest item. */
typedef struct {
    double key;
    int32_t item;
} Entry;

static inline bool
before(Entry a, Entry b)
{
    return a.key < b.key || (a.key == b.key && a.item < b.item);
}

void sift_down(Entry *heap, ptrdiff_t size, ptrdiff_t at);
Entry pop(Entry *heap, ptrdiff_t *size);
/* Stable; `room` is as long as `entries`. */
void sort_entries(Entry *entries, Entry *room, ptrdiff_t size);

typedef struct {
    ptrdiff_t experts;
    ptrdiff_t servers;
    const double *load;  /* by expert */
    const double *speed; /* by server */
} Layer;

/* replicate.c */
void replicate(const double *load, ptrdiff_t experts, ptrdiff_t extra, int64_t cap, bool single, int64_t *count,
               int64_t *picks, Entry *heap);

/* pack.c */
void pack(ptrdiff_t servers, const double *value, const int64_t *order, ptrdiff_t replicas, int64_t room, bool single,
          int64_t *server, int64_t *place, double *filled, int64_t *held, Entry *heap);
void separate(ptrdiff_t replicas, ptrdiff_t servers, ptrdiff_t experts, const double *value, const int64_t *expert,
              int64_t *server, int64_t *place, uint16_t *held);

/* place.c */
#define PLACE_SERVER_BITS 14 /* servers are below 2 to that */

typedef struct {
    double *filled;    /* by server */
    int64_t *left;     /* by server */
    Entry *by_load;    /* by expert */
    Entry *order;      /* by expert */
    Entry *sorting;    /* by expert */
    uint64_t *heap;    /* by server */
    uint64_t *queue;   /* by server */
    uint8_t *held;     /* servers x experts */
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
void count_held(const uint8_t *holds, ptrdiff_t servers, ptrdiff_t experts, int64_t *count);
bool held_load(const Layer *layer, const uint8_t *holds, const int64_t *count, const int64_t *slots, double *filled);
void equal_shares(const uint8_t *holds, ptrdiff_t servers, ptrdiff_t experts, const int64_t *count, double *shares);
void count_overlap(ptrdiff_t servers, ptrdiff_t experts, const int64_t *count, const int32_t *server,
                   const uint8_t *current, ptrdiff_t *start, int32_t *overlap);
int64_t swap_hottest(const Layer *layer, uint8_t *holds, int64_t budget, double *filled, int64_t *count);
void match_greedy(ptrdiff_t servers, const int32_t *overlap, const int64_t *kind, int64_t *pack_of, Entry *pairs,
                  Entry *sorting);
void match_optimal(ptrdiff_t servers, const int32_t *overlap, const int64_t *kind, int64_t *pack_of, double *doubles,
                   int64_t *ints);

/* craft.c */
#define LANES 16 /* batches at a time, where there are several */

void replay(const float *load_EB, ptrdiff_t lanes, int wide, ptrdiff_t experts, ptrdiff_t servers, const int64_t *count,
            const int32_t *server, float *filled_SB, double *balancedness);
void allocate(const double *gain_LK, const int64_t *replicas_K, const int64_t *limit_L, ptrdiff_t layers,
              ptrdiff_t choices, int64_t budget, int64_t *chosen_L, double *best_C, double *next_C, int8_t *choice_LC);
void interleave(const int64_t *total_L, const int64_t *slots_LS, ptrdiff_t layers, ptrdiff_t servers,
                int64_t *assigned_LS, int64_t *sum_S, int32_t *tied);

#endif
