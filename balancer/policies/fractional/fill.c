#include "fill.h"

#include <math.h>
#include <string.h>

/* ---- servers ------------------------------------------------------------------------------------------------ */

static int32_t
slots_of(const Layer *layer, int32_t server)
{
    return layer->first_S[server + 1] - layer->first_S[server];
}

/* The server whose slots fit the remaining items best, so that enough small and large ones remain for the others: as
 * many items as its slots, or one less, should have its share of the load. */
static int32_t
next_server(const Layer *layer, const Items *items, int32_t **open_S, int32_t open, double load, double speed)
{
    int32_t best = 0;
    double best_off = INFINITY;
    for (int32_t i = 0; i < open; i++) {
        int32_t slots = slots_of(layer, (*open_S)[i]);
        double fair = load > 0 ? layer->speed_S[(*open_S)[i]] / speed * items->count : slots - 0.5;
        double off = fair > slots ? fair - slots : fair < slots - 1 ? slots - 1 - fair : 0;
        if (off < best_off) {
            best_off = off;
            best = i;
        }
        if (off == 0) {
            break;
        }
    }
    int32_t server = (*open_S)[best];
    /* Usually it is the first one. */
    memmove(*open_S + 1, *open_S, (size_t)best * sizeof(int32_t));
    ++*open_S;
    return server;
}

static void
put_items(Layer *layer, int32_t server, const Items *given, int32_t count)
{
    Flow *flow = &layer->flow_B[0];
    int32_t slot = layer->first_S[server];
    for (int32_t i = 0; i < count; i++) {
        if (given->expert[i] != NONE) {
            put_everywhere(layer, slot, given->expert[i]);
            flow->flow_N[slot++] = given->rest[i];
        }
    }
}

/* Deals the items to servers; items without a slot remain. */
static void
fill_servers(Layer *layer, Items *items, int32_t *open_S, int32_t open, Items *out)
{
    double speed = 0;
    for (int32_t i = 0; i < open; i++) {
        speed += layer->speed_S[open_S[i]];
    }
    for (; open > 0; open--) {
        double load = add_up(items);
        int32_t server = next_server(layer, items, &open_S, open, load, speed), slots = slots_of(layer, server);
        Share share = {0, 0, NONE, 0};
        if (open == 1) {
            /* Everything left; only the largest items if that is too much. */
            share.count = items->count < slots ? items->count : slots;
            share.first = items->count - share.count;
        } else if (slots > 0) {
            share = choose(items, load * layer->speed_S[server] / speed, slots - 1);
        }
        put_items(layer, server, out, take_share(items, share, out));
        speed -= layer->speed_S[server];
    }
}

/* ---- nodes -------------------------------------------------------------------------------------------------- */

/* Deals the items to nodes like to servers, with at most one expert shared with the next node, and none above the
 * limit; then each node's items to its servers. */
static void
fill_nodes(Layer *layer, Items *items, Items *own, Items *out, int32_t *open_S)
{
    double speed = 0;
    int64_t cross_node = 0;
    for (int32_t s = 0; s < layer->servers; s++) {
        speed += layer->speed_S[s];
    }
    for (int32_t node = 0; node < layer->nodes; node++) {
        int32_t open = 0, whole = 0;
        double node_speed = 0;
        for (int32_t s = 0; s < layer->servers; s++) {
            if (layer->node_S[s] == node) {
                open_S[open++] = s;
                whole += slots_of(layer, s) > 0 ? slots_of(layer, s) - 1 : 0;
                node_speed += layer->speed_S[s];
            }
        }
        if (open == 0) {
            continue;
        }
        Share share = {0, items->count, NONE, 0};
        double load = add_up(items);
        if (speed > node_speed) {
            double capacity = load * node_speed / speed;
            if (cross_node < layer->most_cross_node) {
                share = choose(items, capacity, whole);
                cross_node++;
            } else if (items->count > whole) {
                int32_t first = last_window(items, items->count - whole + 1, whole, capacity + items->crumb);
                share = (Share){first < 0 ? 0 : first, whole, NONE, 0};
            }
        }
        int32_t taken = take_share(items, share, out);
        own->count = own->empty = 0;
        for (int32_t i = 0; i < taken; i++) {
            insert_item(own, out->rest[i], out->expert[i]);
        }
        fill_servers(layer, own, open_S, open, out);
        /* Items without a slot there go to the next node, as may another part of the same expert. */
        for (int32_t i = 0; i < own->count; i++) {
            double rest = own->rest[i];
            for (int32_t j = 0; own->expert[i] != NONE && j < items->count; j++) {
                if (items->expert[j] == own->expert[i]) {
                    rest += items->rest[j];
                    remove_items(items, j, 1);
                    break;
                }
            }
            insert_item(items, rest, own->expert[i]);
        }
        speed -= node_speed;
    }
}

/* ---- all ---------------------------------------------------------------------------------------------------- */

typedef struct {
    Items items, own, out;
    OneByOne one;
} Fill;

static Fill
place_arrays(const Layer *layer, Arena *arena, int32_t slots, double crumb)
{
    int32_t room = slots + layer->experts + 2;
    size_t servers = (size_t)layer->servers, experts = (size_t)layer->experts;
    Fill fill = {.items = make_items(arena, room, crumb)};
    fill.own = make_items(arena, room, crumb);
    fill.out = make_items(arena, room, crumb);
    fill.one.filled_S = carve(arena, servers, sizeof(double));
    fill.one.open_S = carve(arena, servers, sizeof(int32_t));
    fill.one.count_E = carve(arena, experts, sizeof(int64_t));
    fill.one.heap = carve(arena, experts, sizeof(uint64_t));
    return fill;
}

size_t
fill_bytes(const Layer *layer, int32_t slots)
{
    Arena arena = {0};
    place_arrays(layer, &arena, slots, 0);
    return arena.used;
}

void
fill(Layer *layer)
{
    Arena arena = {.block = layer->scratch};
    double load = 0;
    int32_t whole = 0;
    for (int32_t e = 0; e < layer->experts; e++) {
        load += layer->load_E[e];
    }
    for (int32_t s = 0; s < layer->servers; s++) {
        whole += slots_of(layer, s) > 0 ? slots_of(layer, s) - 1 : 0;
    }
    Fill fill = place_arrays(layer, &arena, layer->flow_B[0].slots, load * CRUMB);
    int32_t *open_S = fill.one.open_S;
    if (whole < layer->experts) {
        pack_items(layer, &fill.items, &fill.one);
    } else {
        sort_experts(&fill.items, layer->load_E, NULL, layer->experts, whole - layer->experts);
        if (layer->node_S != NULL) {
            fill_nodes(layer, &fill.items, &fill.own, &fill.out, open_S);
        } else {
            for (int32_t s = 0; s < layer->servers; s++) {
                open_S[s] = s;
            }
            fill_servers(layer, &fill.items, open_S, layer->servers, &fill.out);
        }
        cover(layer);
    }
    use_free_slots(layer, &fill.one);
}
