/* Plans all layers: arrays in, `layer.h` for each layer, arrays out. */
#include <stdlib.h>

#include "../native/export.h"
#include "layer.h"

/* A PAR this close to 1 gets few rounds. */
#define LITTLE 0.005
#define FEW_ROUNDS 4

typedef struct {
    ptrdiff_t scenarios, layers, servers, experts;
    const double *load_BLE, *speed_S;
    const int64_t *slots_LS;
    const uint8_t *current_LSE; /* NULL: nothing is held */
    const double *now_LSE;      /* shares of that; NULL: not known */
    double price;
    uint8_t *holds_LSE;
    double *shares_LSE;
} Task;

typedef struct {
    Layer layer;
    int32_t *first_S;
    void *block; /* load_BE, load_E, the scratch, the flows */
    size_t flow_bytes;
} Room;

static size_t
rounded(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

/* For the layer with the most slots. False: out of memory. */
static bool
make_room(Room *room, const Task *task, int32_t most_slots)
{
    size_t scenarios = (size_t)task->scenarios, experts = (size_t)task->experts;
    int32_t servers = (int32_t)task->servers;
    size_t doubles = scratch_doubles((int32_t)scenarios, servers, (int32_t)experts, most_slots);
    size_t counts = scratch_counts(servers, (int32_t)experts, most_slots);
    room->flow_bytes = rounded(flow_bytes(servers, (int32_t)experts, most_slots));
    size_t bytes = rounded(((scenarios + 1) * experts + doubles) * sizeof(double)) + rounded(counts * sizeof(int32_t)) +
                   scenarios * room->flow_bytes;
    room->first_S = malloc(((size_t)servers + 1) * sizeof(int32_t));
    room->layer.flow_B = malloc(scenarios * sizeof(Flow));
    room->block = malloc(bytes);
    if (room->first_S == NULL || room->layer.flow_B == NULL || room->block == NULL) {
        return false;
    }
    Layer *layer = &room->layer;
    layer->scenarios = (int32_t)scenarios;
    layer->servers = servers;
    layer->experts = (int32_t)experts;
    layer->first_S = room->first_S;
    layer->speed_S = task->speed_S;
    layer->price = task->price;
    layer->load_BE = room->block;
    layer->load_E = layer->load_BE + scenarios * experts;
    layer->scratch = layer->load_E + experts;
    layer->counts = (int32_t *)(layer->scratch + doubles);
    return true;
}

static void
free_room(Room *room)
{
    free(room->block);
    free(room->layer.flow_B);
    free(room->first_S);
}

static void
begin_layer(Room *room, const Task *task, ptrdiff_t index)
{
    Layer *layer = &room->layer;
    size_t scenarios = (size_t)task->scenarios, experts = (size_t)task->experts;
    int32_t slots = 0;
    for (ptrdiff_t s = 0; s < task->servers; s++) {
        room->first_S[s] = slots;
        slots += (int32_t)task->slots_LS[index * task->servers + s];
    }
    room->first_S[task->servers] = slots;
    for (size_t e = 0; e < experts; e++) {
        layer->load_E[e] = 0;
        for (size_t b = 0; b < scenarios; b++) {
            double load = task->load_BLE[(b * (size_t)task->layers + (size_t)index) * experts + e];
            layer->load_BE[b * experts + e] = load;
            layer->load_E[e] += load / (double)scenarios;
        }
    }
    char *flows = (char *)room->block;
    size_t before = rounded((size_t)((char *)layer->counts - flows) +
                            scratch_counts(layer->servers, layer->experts, slots) * sizeof(int32_t));
    for (size_t b = 0; b < scenarios; b++) {
        flow_init(&layer->flow_B[b], flows + before + b * room->flow_bytes, layer->servers, layer->experts,
                  room->first_S, task->speed_S);
    }
}

/* Writes holds and shares; shares are means over the scenarios' flows. */
static void
write_layer(const Room *room, const Task *task, ptrdiff_t index)
{
    const Layer *layer = &room->layer;
    const Flow *first = &layer->flow_B[0];
    size_t experts = (size_t)layer->experts, begin = (size_t)index * (size_t)layer->servers * experts;
    double *share_N = layer->scratch;
    for (int32_t n = 0; n < first->slots; n++) {
        int32_t e = first->expert_N[n];
        double part = 0;
        for (int32_t b = 0; e != NONE && b < layer->scenarios; b++) {
            part += layer->flow_B[b].flow_N[n];
        }
        share_N[n] = e == NONE ? 0 : layer->load_E[e] > 0 ? part / (layer->load_E[e] * layer->scenarios) : 1;
    }
    for (int32_t e = 0; e < layer->experts; e++) {
        double sum = 0;
        for (int32_t n = first->head_E[e]; n != NONE; n = first->next_N[n]) {
            share_N[n] = share_N[n] > LEAST_SHARE ? share_N[n] : LEAST_SHARE;
            sum += share_N[n];
        }
        for (int32_t n = first->head_E[e]; n != NONE; n = first->next_N[n]) {
            size_t at = begin + (size_t)first->server_N[n] * experts + (size_t)e;
            task->holds_LSE[at] = 1;
            task->shares_LSE[at] = share_N[n] / sum;
        }
    }
}

static void
plan_layer(Room *room, const Task *task, ptrdiff_t index)
{
    Layer *layer = &room->layer;
    int32_t rounds = INT32_MAX;
    begin_layer(room, task, index);
    if (task->current_LSE != NULL) {
        ptrdiff_t at = index * task->servers * task->experts;
        keep(layer, task->current_LSE + at, task->now_LSE == NULL ? NULL : task->now_LSE + at);
        if (layer->scenarios == 1 && refill(layer) < LITTLE) {
            rounds = FEW_ROUNDS;
        }
    } else {
        fill(layer);
    }
    improve(layer, rounds);
    for (int32_t b = 0; b < layer->scenarios; b++) {
        flow_level(&layer->flow_B[b], 1e-9, true);
    }
    write_layer(room, task, index);
}

EXPORT int
plan_fractional(const double *load_BLE, ptrdiff_t scenarios, ptrdiff_t layers, ptrdiff_t servers, ptrdiff_t experts,
                const int64_t *slots_LS, const double *speed_S, const uint8_t *current_LSE, const double *now_LSE,
                double price, uint8_t *holds_LSE, double *shares_LSE)
{
    Task task = {
        .scenarios = scenarios, .layers = layers, .servers = servers, .experts = experts,
        .load_BLE = load_BLE, .speed_S = speed_S, .slots_LS = slots_LS,
        .current_LSE = current_LSE, .now_LSE = now_LSE, .price = price,
        .holds_LSE = holds_LSE, .shares_LSE = shares_LSE,
    };
    if (servers > INT32_MAX / 16 / experts) {
        return TOO_MANY;
    }
    int32_t most_slots = 0;
    for (ptrdiff_t l = 0; l < layers; l++) {
        int32_t slots = 0;
        for (ptrdiff_t s = 0; s < servers; s++) {
            slots += (int32_t)slots_LS[l * servers + s];
        }
        most_slots = slots > most_slots ? slots : most_slots;
    }
    Room room = {0};
    bool fits = make_room(&room, &task, most_slots);
    for (ptrdiff_t l = 0; fits && l < layers; l++) {
        plan_layer(&room, &task, l);
    }
    free_room(&room);
    return fits ? DONE : NO_MEMORY;
}
